"""Builds a rank's expert desk: counters always, and live rebalancing where the plan asks for it."""

import time
from collections.abc import Callable, Sequence

import msgspec

from moe_runtime.engine.balancing.agent import Balancing
from moe_runtime.engine.balancing.controller import Controller, Settings
from moe_runtime.engine.balancing.courier import Staging
from moe_runtime.engine.balancing.desk import ExpertDesk
from moe_runtime.engine.balancing.load import ExpertLoad, WindowMeter
from moe_runtime.engine.balancing.merge import LoadMerge
from moe_runtime.engine.balancing.mover import Mover
from moe_runtime.engine.balancing.registry import ExpertRegistry
from moe_runtime.engine.balancing.reload import Reloader
from moe_runtime.engine.balancing.solver import SolverProcess
from moe_runtime.engine.balancing.wire import NewPlacement
from moe_runtime.engine.sockets import Outbox
from moe_runtime.expert_parallel.slot_table import SlotTable
from moe_runtime.launch.place import Place
from moe_runtime.launch.rendezvous import opening
from moe_runtime.placement.placement import Placement
from moe_runtime.shared_memory import WindowAddress
from moe_runtime.spec.model import ModelSpec

Send = Callable[[int, msgspec.Struct], None]


def make_expert_desk(
    place: Place,
    model: ModelSpec,
    *,
    placement: Placement,
    load: ExpertLoad,
    table: SlotTable,
    registry: ExpertRegistry,
    reload: Reloader,
    inboxes: Sequence[str],
    staging: Sequence[WindowAddress | None],
    outbox: Outbox,
) -> ExpertDesk:
    """`model` as it is served; `inboxes` and `staging` of the instance's ranks, in their order."""
    settings = place.deployment.balancing
    desk = ExpertDesk(
        instance=place.instance.name,
        deployment=place.deployment.name,
        rank=place.rank,
        layers=tuple(model.moe_layers),
        load=load,
        placement=placement,
        reload=reload,
    )
    if not settings.enabled:
        return desk
    sizes = {"num_slots": registry.num_slots, "slot_bytes": registry.slot_bytes}
    mover = Mover(
        rank=place.rank,
        placement=placement,
        table=table,
        registry=registry,
        staging=open_staging(staging, **sizes),
        bytes_per_step=settings.bytes_per_step,
        timeout=settings.timeout_s,
    )

    def send(rank: int, message: msgspec.Struct) -> None:
        outbox.send(inboxes[rank], message)

    solver = SolverProcess() if place.rank == 0 else None
    desk.balancing = Balancing(
        instance=place.instance.name,
        mover=mover,
        meter=WindowMeter(load, rank=place.rank, interval_tokens=settings.interval_tokens),
        send=send,
        controller=_controller(place, mover, solver, send) if solver is not None else None,
        solver=solver,
    )
    return desk


def open_staging(
    addresses: Sequence[WindowAddress | None], *, num_slots: int, slot_bytes: int
) -> list[Staging]:
    """Those of all ranks of the instance, which all have one. PeerLost names one that is gone."""
    staging = []
    for rank, address in enumerate(addresses):
        assert address is not None, f"rank {rank} moves no experts"
        with opening("staging window", rank):
            staging.append(Staging.open(address, num_slots=num_slots, slot_bytes=slot_bytes))
    return staging


def _controller(place: Place, mover: Mover, solver: SolverProcess, send: Send) -> Controller:
    """Rank 0's."""
    settings, placement = place.deployment.balancing, mover.placement

    def send_others(message: NewPlacement) -> None:
        for rank in range(1, place.num_ranks):
            send(rank, message)

    return Controller(
        merge=LoadMerge(place.num_ranks, placement.num_layers, placement.num_experts),
        solver=solver,
        settings=Settings(
            to_fill=placement.num_experts + place.deployment.redundant_experts,
            horizon_windows=settings.horizon_windows,
            min_gain=settings.min_gain,
        ),
        mover=mover,
        send=send_others,
        started=time.monotonic(),
    )
