"""Two micro-batches on two streams: who waits for whom. Without a GPU the streams write a log."""

from collections.abc import Generator
from contextlib import contextmanager
from itertools import groupby

import pytest
import torch
from torch import Tensor

from moe_runtime.engine import overlap
from moe_runtime.engine.two_streams import TwoStreams
from moe_runtime.models.context import NoClock
from moe_runtime.models.layer import Cut

LAYERS = 3
CUTS: tuple[Cut, ...] = ("attention", "dispatch", "shared", "combine")


class FakeCuda:
    """What TwoStreams asks of torch.cuda. `log`: (stream, what it does), in order of issue."""

    def __init__(self) -> None:
        self.log: list[tuple[str, object]] = []
        self.names = iter(("s0", "s1"))
        self.events = iter(range(1000))
        self.current = "main"
        fake = self

        class Stream:
            def __init__(self, name: str | None = None) -> None:
                self.name = name or next(fake.names)

            def wait_stream(self, other: "Stream") -> None:
                fake.log.append((self.name, f"wait {other.name}"))

            def wait_event(self, event: "Event") -> None:
                fake.log.append((self.name, ("wait", event.number)))

        class Event:
            def __init__(self) -> None:
                self.number = next(fake.events)

            def record(self, stream: Stream) -> None:
                fake.log.append((stream.name, ("record", self.number)))

        @contextmanager
        def stream(of: Stream) -> Generator[None, None, None]:
            before, fake.current = fake.current, of.name
            yield
            fake.current = before

        self.Stream, self.Event, self.stream = Stream, Event, stream
        self.current_stream = lambda: Stream(self.current)


class Step:
    clock = NoClock()


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    for name in ("Stream", "Event", "stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def run(cuda: FakeCuda, order: overlap.Order) -> None:
    def layer(x_TH: Tensor, step: object) -> Generator[Cut, None, Tensor]:
        for cut in CUTS:
            cuda.log.append((cuda.current, ("stage", int(x_TH[0, 0]))))
            yield cut
        cuda.log.append((cuda.current, ("stage", int(x_TH[0, 0]))))
        return x_TH

    batches = [(torch.full((1, 1), float(b)), Step()) for b in range(2)]
    overlap.run(batches, [layer] * LAYERS, order=order, lanes=TwoStreams())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("order", "stages"), [(overlap.PREFILL, 2 * LAYERS + 1), (overlap.DECODE, 5 * LAYERS)]
)
def test_each_stage_of_the_second_waits_for_that_stage_of_the_first(cuda, order, stages):
    run(cuda, order)
    # A stage may have several pieces between the places where a layer could have been left.
    first = [what for what, _ in groupby(what for stream, what in cuda.log if stream == "s0")]
    second = [what for what, _ in groupby(what for stream, what in cuda.log if stream == "s1")]
    numbers = range(stages)
    assert first == ["wait main", *(w for n in numbers for w in (("stage", 0), ("record", n)))]
    assert second == ["wait main", *(w for n in numbers for w in (("wait", n), ("stage", 1)))]
    assert [what for stream, what in cuda.log if stream == "main"] == ["wait s0", "wait s1"]
    # What is waited for has been recorded before: an event that has not been waits for nothing.
    order = [what for _, what in cuda.log]
    assert all(order.index(("record", n)) < order.index(("wait", n)) for n in numbers)
    assert [what for stream, what in cuda.log[-2:]] == ["wait s0", "wait s1"]


def test_they_can_be_used_again(cuda):
    lanes = TwoStreams()
    for _ in range(2):
        cuda.log.clear()
        with lanes.both():
            for micro_batch in (0, 1):
                with lanes.stage(micro_batch):
                    pass
        waits = [what for _, what in cuda.log if isinstance(what, tuple)]
        assert waits[0][1] == waits[1][1]
