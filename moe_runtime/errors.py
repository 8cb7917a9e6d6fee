"""All error classes of the runtime: one class per reaction of the caller.

MoeRuntimeError
├── UserError                 the user can mend it: one message, exit code 2
│   ├── PlanError             a key of the plan; carries key, value and what would work
│   ├── CheckpointError       a file or tensor of a checkpoint
│   ├── InputError            a prompt file, a trace, a request
│   └── UnavailableError      an optional package is missing; carries the install line
├── RequestRefused            one request cannot be served; the others go on
│   └── NoRoom                no rank has room for it now: worth asking again
├── StepTimeout               ranks did not arrive in time: the instance ends
├── PeerLost                  a peer process is gone: the instance ends (secondary failure)
└── TransferError             KV could not be moved; the request may be prefilled again
    ├── LeaseExpired          the blocks are no longer ours to read
    └── LayoutMismatch        the two sides store KV differently; never retried

`kernels`, `placement` and `eplb` stand alone and raise their own subclasses of ValueError.
"""

from collections.abc import Sequence


class MoeRuntimeError(Exception):
    """Base of everything the runtime raises on purpose."""


class UserError(MoeRuntimeError):
    """Something the user can mend. The command line prints the message and exits with 2."""


class PlanError(UserError):
    """A key of the plan is unknown, has a wrong value, or cannot work with the others.

    `key` is the dotted path, `value` what stands there, `hint` a number or name that would work.
    """

    def __init__(self, key: str, problem: str, *, value: object = None, hint: str = "") -> None:
        self.key = key
        self.value = value
        self.hint = hint
        self.problems: tuple[PlanError, ...] = (self,)
        shown = "" if value is None else f" = {value!r}"
        super().__init__(f"{key}{shown}: {problem}" + (f"; {hint}" if hint else ""))

    @classmethod
    def together(cls, problems: "Sequence[PlanError]") -> "PlanError":
        """One error for several problems, a line each; key, value and hint are the first one's."""
        first = problems[0]
        error = cls(first.key, "", value=first.value, hint=first.hint)
        error.args = ("\n".join(str(p) for p in problems),)
        error.problems = tuple(problems)
        return error


class CheckpointError(UserError):
    """A checkpoint file or tensor is missing, damaged or not what the model needs."""


class InputError(UserError):
    """A prompt file, trace or request is malformed; the message names file and line or field."""


class UnavailableError(UserError):
    """An optional package is missing; the message has the line that installs it."""

    def __init__(self, package: str, needed_for: str, extra: str) -> None:
        super().__init__(f"{needed_for} needs {package}: pip install 'moe-runtime[{extra}]'")


class RequestRefused(MoeRuntimeError):
    """One request cannot be served (too long, bad parameters); the instance goes on."""


class NoRoom(RequestRefused):
    """Every rank that could take a request has promised all it can; in a while it may be different."""


class StepTimeout(MoeRuntimeError):
    """A blocking wait passed its deadline.

    Names the step, the layer (-1 outside the model), the operation and the ranks waited for.
    """

    def __init__(
        self, *, step: int, operation: str, ranks: Sequence[int], seconds: float, layer: int = -1
    ) -> None:
        self.step, self.layer, self.operation, self.ranks = step, layer, operation, tuple(ranks)
        waiting = _waiting_for(step, layer, operation, ranks)
        super().__init__(f"{waiting}: not there after {seconds:.1f} s")


class PeerLost(MoeRuntimeError):
    """Contact with a peer process broke: a consequence of a failure elsewhere."""

    @classmethod
    def in_step(
        cls, *, step: int, layer: int, operation: str, ranks: Sequence[int], what: str = "no longer running"
    ) -> "PeerLost":
        """`what` happened to ranks that a step waits for: their processes have ended."""
        return cls(f"{_waiting_for(step, layer, operation, ranks)}: {what}")


def _waiting_for(step: int, layer: int, operation: str, ranks: Sequence[int]) -> str:
    names = ", ".join(str(r) for r in ranks)
    place = f"layer {layer}, " if layer >= 0 else ""
    return f"waiting for rank{'s' if len(ranks) != 1 else ''} {names}, {place}{operation}, step {step}"


class TransferError(MoeRuntimeError):
    """KV blocks could not be moved between instances."""


class LeaseExpired(TransferError):
    """The lease on the source blocks is over; a read would see another request's KV."""


class LayoutMismatch(TransferError):
    """Source and destination store KV differently; both fingerprints are in the message."""
