"""Two CUDA streams for two micro-batches, eager or while a graph is captured.

Owns streams and events, and knows nothing of layers. Micro-batch 1 must not run a stage before
micro-batch 0 has: a prompt that was cut in two reads in the second half what the first half writes
in the same stage. Beyond that the streams run freely beside each other.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TwoStreams:
    """Lanes of `overlap.run` on the current CUDA device; may be used for one step after the other.

    Tensors of a step must be dropped before the next one begins, which waits for this one's stream.
    """

    def __init__(self) -> None:
        self._streams = (torch.cuda.Stream(), torch.cuda.Stream())  # type: ignore[no-untyped-call]
        self._done: list[torch.cuda.Event] = []
        self._second = 0

    @contextmanager
    def both(self) -> Iterator[None]:
        """Fork from the current stream, and join it again."""
        current = torch.cuda.current_stream()
        self._done, self._second = [], 0
        for stream in self._streams:
            stream.wait_stream(current)
        yield
        for stream in self._streams:
            current.wait_stream(stream)

    @contextmanager
    def stage(self, micro_batch: int) -> Iterator[None]:
        """Stage n of micro-batch 1 waits for stage n of micro-batch 0, which is always issued before it."""
        stream = self._streams[micro_batch]
        if micro_batch == 1:
            stream.wait_event(self._done[self._second])
            self._second += 1
        with torch.cuda.stream(stream):
            yield
        if micro_batch == 0:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
            self._done.append(event)
