"""Advice: how many replicas of a role the load asks for. Pure: `now` is an argument.

Only advises; whoever scales reads `/admin/advice`. More replicas are advised as soon as requests
queue or KV runs short; fewer only when the rest would still have room, one at a time, and never
before the last change had time to show (the cooldown, at least the measured time to load a replica).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from moe_runtime.frontend.board import RankView


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When is enough enough.

    queue_seconds   a queue longer than this asks for more
    kv_use          fraction of KV in use that asks for more
    spare           fewer replicas only if the rest would be used less than this fraction of both bounds
    cooldown        seconds between a change and the next advice to shrink; growing waits for loading only
    most            replicas at most
    """

    queue_seconds: float
    kv_use: float = 0.85
    spare: float = 0.6
    cooldown: float = 300.0
    most: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Signals:
    """What one role says of itself.

    replicas          instances that serve now
    tokens_in_flight  tokens queued or in the KV cache
    queue_seconds     tokens queued / tokens per second computed; infinite if they queue and none is computed
    kv_use            fraction of the KV blocks of the fullest rank that live sequences hold
    load_seconds      measured from the start of a replica until it was ready
    """

    role: str
    replicas: int
    tokens_in_flight: int
    queue_seconds: float
    kv_use: float
    load_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do about a role. `since`: when `replicas` was first advised."""

    signals: Signals
    replicas: int
    since: float
    reason: str


def signals_of(role: str, views: Sequence[RankView], *, load_seconds: float) -> Signals:
    """The signals of a role from the statuses of its ranks; `views` has at least one of them."""
    own = [v for v in views if v.status.deployment == role]
    queued = sum(v.status.waiting_tokens for v in own)
    held = sum(v.status.kv_used * v.status.block_tokens for v in own)
    rate = sum(v.rate("new_prefill") + v.rate("recomputed") + v.rate("output") for v in own)
    return Signals(
        role=role,
        replicas=len({v.status.instance for v in own}),
        tokens_in_flight=queued + held,
        queue_seconds=0.0 if not queued else queued / rate if rate else math.inf,
        kv_use=max(v.status.kv_used / v.status.kv_blocks for v in own),
        load_seconds=load_seconds,
    )


def advise(signals: Signals, policy: Policy, previous: Advice | None, now: float) -> Advice:
    """The advice for a role, given the last one (None: there was none).

    Growth is in proportion to what is short, at most to twice as many at a time.
    """
    have = signals.replicas
    use = {
        f"{signals.queue_seconds:.1f} s of work queue": signals.queue_seconds / policy.queue_seconds,
        f"{signals.kv_use:.0%} of KV is in use": signals.kv_use / policy.kv_use,
    }
    reason, pressure = max(use.items(), key=lambda item: item[1])
    wanted, why = have, "the load is within bounds"
    if pressure > 1:
        wanted, why = min(policy.most, math.ceil(have * min(2.0, pressure))), reason
    elif have > 1 and pressure * have / (have - 1) < policy.spare:
        wanted, why = have - 1, f"{have - 1} would do: {reason}"
    if previous is None:
        return Advice(signals=signals, replicas=wanted, since=now, reason=why)
    # A change that was followed shows up as another number of replicas: it starts the clock too.
    changed = now if previous.signals.replicas != have else previous.since
    waited = now - changed
    wait = signals.load_seconds if wanted > have else max(policy.cooldown, signals.load_seconds)
    asked_before = previous.replicas if previous.signals.replicas == have else have
    if wanted != asked_before and waited < wait:
        kept = f"{why}; {wait - waited:.0f} s of cooldown are left"
        return Advice(signals=signals, replicas=asked_before, since=changed, reason=kept)
    since = changed if wanted == asked_before else now
    return Advice(signals=signals, replicas=wanted, since=since, reason=why)
