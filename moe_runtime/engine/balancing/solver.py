"""The solver of an instance: a process of its own, which rank 0 asks and never waits for.

A thread of rank 0 would take the interpreter from the forward pass; another process does not. A `Thinker` in
it answers each question, a window of counts, with a decision. Frames of msgpack over its pipes, 4 bytes of
length first. When its pipe closes, it ends.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO

import msgspec

from moe_runtime.engine.balancing.thinker import Answer, Question, Thinker

NICE = 5
_LENGTH_BYTES = 4


class SolverProcess:
    """Rank 0's end. `ask` and `answer` return at once; one question at a time."""

    def __init__(self) -> None:
        self._questions: SimpleQueue[bytes | None] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process, and the thread that talks to it."""
        command = [sys.executable, "-m", "moe_runtime.engine.balancing.solver"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._questions, self._answers, self._process = SimpleQueue(), SimpleQueue(), process
        threading.Thread(
            target=_talk, args=(process, self._questions, self._answers), name="solver", daemon=True
        ).start()

    def ask(self, question: Question) -> None:
        self._questions.put(msgspec.msgpack.encode(question))

    def answer(self) -> Answer | None:
        """The next answer, if it is there."""
        try:
            return self._answers.get_nowait()
        except Empty:
            return None

    def wait(self, seconds: float) -> Answer:
        """The next answer; at start-up only. TimeoutError."""
        try:
            return self._answers.get(timeout=seconds)
        except Empty:
            raise TimeoutError(f"the solver did not answer within {seconds:g} s") from None

    def restart(self) -> None:
        """Start over with a new process, which has seen no loads."""
        self.close()
        self.start()

    def close(self) -> None:
        self._questions.put(None)
        if self._process is not None:
            self._process.kill()


def _talk(
    process: "subprocess.Popen[bytes]",
    questions: "SimpleQueue[bytes | None]",
    answers: "SimpleQueue[Answer]",
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    while (question := questions.get()) is not None:
        try:
            _write(process.stdin, question)
            frame = _read(process.stdout)
        except OSError:
            frame = None
        if frame is None:
            answers.put(Answer(ended=True))
            break
        answers.put(msgspec.msgpack.decode(frame, type=Answer))
    process.kill()
    process.wait()
    with suppress(BrokenPipeError):  # a question that was not read
        process.stdin.close()
    process.stdout.close()


def _write(pipe: IO[bytes], frame: bytes) -> None:
    pipe.write(len(frame).to_bytes(_LENGTH_BYTES, "little") + frame)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """The next frame; None at the end."""
    head = pipe.read(_LENGTH_BYTES)
    size = int.from_bytes(head, "little")
    frame = pipe.read(size) if len(head) == _LENGTH_BYTES else b""
    return frame if size and len(frame) == size else None


# -- the process ------------------------------------------------------------------------------


def main() -> None:
    """Answer questions from the standard input until it ends."""
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its rank
    thinker = Thinker()
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    while (frame := _read(stdin)) is not None:
        question = msgspec.msgpack.decode(frame, type=Question)
        try:
            _write(stdout, msgspec.msgpack.encode(thinker.think(question)))
        except BrokenPipeError:  # the rank is gone
            os._exit(0)


if __name__ == "__main__":
    main()
