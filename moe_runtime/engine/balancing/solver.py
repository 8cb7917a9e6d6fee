"""The solver of an instance: a process of its own, which rank 0 asks and never waits for.

A thread of rank 0 would take the interpreter from the forward pass; another process does not. It keeps the
load window, and answers each question, a window of counts, with a decision. Frames of msgpack over its pipes,
4 bytes of length first. When its pipe closes, it ends.
"""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, Literal

import msgspec
import numpy as np

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.policy import Decision, RebalancePolicy
from moe_runtime.eplb.solve import solve
from moe_runtime.eplb.window import LoadWindow
from moe_runtime.placement.placement import Placement
from moe_runtime.placement.stages import starts_by_slot
from moe_runtime.placement.topology import Topology

NICE = 5
_LENGTH_BYTES = 4


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What to do after a window.

    pairs             float64 [L, E]: counts of the window; empty: no window ended
    slots, starts     the placement in use: int32 and uint16 [L, S]
    to_fill           slots that a plan may fill, S less the surplus ones
    force             move to the best placement for the loads so far, whether it pays or not
    """

    pairs: bytes
    num_layers: int
    num_experts: int
    num_ranks: int
    epoch: int
    slots: bytes
    starts: bytes
    to_fill: int
    seconds_per_pair: float
    seconds_per_byte: float
    expert_bytes: int
    horizon_windows: float
    min_gain: float
    force: bool

    def placement(self) -> Placement:
        shape = self.num_layers, -1
        return Placement(
            slot_to_expert_LS=np.frombuffer(self.slots, np.int32).reshape(shape),
            num_experts=self.num_experts,
            num_ranks=self.num_ranks,
            epoch=self.epoch,
            cumulative_LS=np.frombuffer(self.starts, np.uint16).reshape(shape),
        )


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """A decision; arrays as in NewPlacement, empty unless there is something to do.

    `error` says why there is none; `ended`: because the process is gone.

    balancedness, bound, gap  means over the layers: predicted, the most that is possible, the plan's distance
    """

    action: Literal["wait", "resplit", "move"] = "wait"
    why: str = ""
    error: str = ""
    ended: bool = False
    slots: bytes = b""
    starts: bytes = b""
    moves: bytes = b""
    balancedness: float | None = None
    bound: float | None = None
    gap: float | None = None


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


class Thinker:
    """The window of one instance, and what follows from it."""

    def __init__(self) -> None:
        self.window: LoadWindow | None = None

    def think(self, question: Question) -> Answer:
        """The answer to a question; a window that cannot be is left out, and said to be."""
        current = question.placement()
        if self.window is None:
            self.window = LoadWindow.empty(question.num_layers, question.num_experts)
        try:
            if question.pairs:
                pairs = np.frombuffer(question.pairs, np.float64)
                self.window = self.window.observe(pairs.reshape(question.num_layers, question.num_experts))
            decision = self._decide(question, self.window, current)
        except BalanceError as error:
            return Answer(error=str(error))
        return _answer(decision)

    def _decide(self, question: Question, window: LoadWindow, current: Placement) -> Decision:
        cost = question.seconds_per_byte
        topology = Topology(nodes=1, ranks_per_node=question.num_ranks, seconds_per_byte=(cost, cost, cost))
        if question.force and window.windows:
            solution = solve(
                window.load_LE,
                topology,
                question.to_fill,
                current=current,
                expert_bytes=float(question.expert_bytes),
            )
            return Decision(action="move", solution=solution, why="asked for")
        policy = RebalancePolicy(
            topology=topology,
            slots=question.to_fill,
            seconds_per_pair=question.seconds_per_pair,
            expert_bytes=float(question.expert_bytes),
            horizon_windows=question.horizon_windows,
            min_gain=question.min_gain,
        )
        return policy.decide(window, current)


def _answer(decision: Decision) -> Answer:
    solution = decision.solution
    if solution is None:
        return Answer(why=decision.why)
    plan, target = solution.moves, solution.placement
    assert plan is not None
    act = decision.action != "wait"
    bounded = solution.bound_L > 0
    best_L = np.where(bounded, solution.mean_L / np.where(bounded, solution.bound_L, 1), 1.0)
    return Answer(
        action=decision.action,
        why=decision.why,
        slots=target.slot_to_expert_LS.tobytes() if act else b"",
        starts=starts_by_slot(target).tobytes() if act else b"",
        moves=np.stack([plan.layer_M, plan.slot_M, plan.source_M]).tobytes() if act else b"",
        balancedness=float(solution.balancedness_L.mean()),
        bound=float(best_L.mean()),
        gap=float(solution.gap_L.mean()),
    )


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
