"""What a reader of a simulated report should know of its script, in sentences."""

from collections.abc import Iterator, Mapping, Sequence

from moe_runtime.plan.effective import EffectivePlan
from moe_runtime.virtual.run.course import ALL, LoadDrift, LoadShift
from moe_runtime.virtual.run.prepare import Prepared
from moe_runtime.virtual.run.script import FailureAt, Scripted


def script_notes(
    plan: EffectivePlan, prepared: Mapping[str, Prepared], scripted: Sequence[Scripted]
) -> tuple[str, ...]:
    """Of events that change what the other figures mean, in the order of the script."""
    deployment_of = {one.name: one.deployment for one in plan.instances}
    return tuple(note for event in scripted for note in _notes(event, prepared, deployment_of))


def _notes(
    event: Scripted, prepared: Mapping[str, Prepared], deployment_of: Mapping[str, str]
) -> Iterator[str]:
    if isinstance(event, LoadShift):
        part = "" if event.mix == 1 else f" of {100 * event.mix:g} % of the traffic"
        yield f"From {event.at:g} s on, expert loads{part} {_whose(event)} are those of {event.to}."
    elif isinstance(event, LoadDrift):
        yield (
            f"From {event.start:g} to {event.end:g} s, expert loads {_whose(event)} stray by {event.noise:g}"
            f" every {event.every:g} s, with correlation {event.correlation:g}."
        )
    elif isinstance(event, FailureAt):
        if event.restart_after is None:
            yield f"{event.instance} fails at {event.at:g} s and stays away."
            return
        one = prepared[deployment_of[event.instance]]
        yield (
            f"{event.instance} fails at {event.at:g} s and is started anew {event.restart_after:g} s later;"
            f" reading {one.weight_bytes / 1e9:.3g} GB of weights a rank takes {one.read_seconds:.3g} s more."
        )


def _whose(event: LoadShift | LoadDrift) -> str:
    return "of all deployments" if event.deployment == ALL else f"of {event.deployment}"
