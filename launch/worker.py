"""Builds one rank: weights, buffer, KV pool, windows, desk, engine. The composition root of a rank.

Two phases: `load` needs this rank only (and its process group), `assemble` needs what every rank
published about itself.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch
import zmq
from torch import Tensor

from moe_runtime.checkpoint.load import LoadReport
from moe_runtime.engine.balancing.courier import Staging
from moe_runtime.engine.balancing.load import ExpertLoad
from moe_runtime.engine.balancing.registry import ExpertRegistry, register
from moe_runtime.engine.balancing.reload import Reloader
from moe_runtime.engine.clock import StepClock
from moe_runtime.engine.collectives import CollectiveTrace, TracedBuffer, TracedExchange
from moe_runtime.engine.desk import RequestDesk
from moe_runtime.engine.handovers import Handovers
from moe_runtime.engine.identity import Identity
from moe_runtime.engine.limits import LEASE_SECONDS, agree_limits, chunk_budget, scheduler_limits
from moe_runtime.engine.messages import ToRank
from moe_runtime.engine.promises import Promises, room_of
from moe_runtime.engine.rank import RankEngine
from moe_runtime.engine.sockets import Inbox, Outbox
from moe_runtime.engine.structures import Structures
from moe_runtime.engine.tally import Tally
from moe_runtime.expert_parallel.slot_table import SlotTable
from moe_runtime.launch.agreement import Agreement, AgreementAddress
from moe_runtime.launch.balancing import make_expert_desk
from moe_runtime.launch.buffers import RankBuffer, by_mode, connect_buffer, dispatch_window, make_buffer
from moe_runtime.launch.kernels import kernels_of
from moe_runtime.launch.place import Place
from moe_runtime.launch.preflight import Preflight
from moe_runtime.launch.sockets import inbox_address
from moe_runtime.launch.weights import WeightReader
from moe_runtime.models.decoder import Decoder, build_decoder
from moe_runtime.models.families.registry import skipped_tensor, tensor_targets
from moe_runtime.placement.placement import Placement
from moe_runtime.report.records import StepLog
from moe_runtime.scheduler.scheduler import Scheduler
from moe_runtime.shared_memory import Window, WindowAddress
from moe_runtime.transfer.host import HostPool, HostTransport, PoolExport
from moe_runtime.transfer.interface import LayoutFingerprint, digest, fingerprint
from moe_runtime.transfer.leases import Leases

STEP_TIMEOUT = 120.0


class RankCard(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank tells all others at start-up."""

    instance: str
    deployment: str
    rank: int
    inbox: str
    placement: str
    agreement: AgreementAddress | None
    dispatch_window: WindowAddress | None
    staging_window: WindowAddress | None
    pool: PoolExport | None


@dataclass(slots=True, kw_only=True)
class Loaded:
    """A rank with its weights in place."""

    place: Place
    decoder: Decoder
    reader: WeightReader
    buffer: RankBuffer
    placement: Placement
    load: ExpertLoad
    table: SlotTable
    registry: ExpertRegistry
    staging_window: Window | None
    kv_cache: list[Tensor]
    pool: HostPool | None
    layout: LayoutFingerprint
    agreement: Agreement
    collectives: CollectiveTrace | None
    dispatch_window: Window | None
    report: LoadReport


def load(flight: Preflight, place: Place, collectives: CollectiveTrace | None = None) -> Loaded:
    """Build the decoder of a rank, read its weights, and allocate its KV cache.

    `collectives` is told of everything the rank does together with others.
    """
    deployment = place.deployment
    model = deployment.served(flight.model)
    device = torch.device(flight.effective.cluster.device)
    placement = flight.placements[deployment.name]
    slots = placement.slots_per_rank
    buffer = make_buffer(
        model, deployment, rank=place.rank, slots_per_rank=slots, device=device, timeout=STEP_TIMEOUT
    )
    expert_load = ExpertLoad(model.num_moe_layers, model.moe.slot_experts, device)
    table = SlotTable(placement, source_rank=place.rank, device=device, load_LE=expert_load.counter_LE)
    reader = WeightReader(
        build=partial(
            build_decoder,
            model,
            slots_per_rank=slots,
            buffers=by_mode(TracedBuffer(buffer, collectives) if collectives else buffer, deployment),
            slot_tables=[table.layer(i) for i in range(model.num_moe_layers)],
            dtype=getattr(torch, model.dtype),
            device=device,
            deterministic=deployment.deterministic,
            kernels=kernels_of(deployment),
        ),
        targets=tensor_targets(model),
        skipped=partial(skipped_tensor, model),
        rank=place.rank,
    )
    decoder, report = reader.read(Path(flight.effective.model.path), placement)
    registry = register(decoder, reader.targets)
    group, blocks = deployment.kv.primary, deployment.kv_cache.blocks
    pool = HostPool.create(group, blocks) if deployment.name == "prefill" else None
    shape = (blocks, group.block_tokens, group.entry)
    cache = (
        pool.cache if pool else [torch.zeros(shape, dtype=getattr(torch, group.dtype)) for _ in group.layers]
    )
    return Loaded(
        place=place,
        decoder=decoder,
        reader=reader,
        buffer=buffer,
        placement=placement,
        load=expert_load,
        table=table,
        registry=registry,
        staging_window=Staging.create_window(registry.num_slots, registry.slot_bytes)
        if deployment.balancing.enabled
        else None,
        kv_cache=cache,
        pool=pool,
        layout=fingerprint(digest(repr(flight.model)), deployment.kv),
        agreement=Agreement(place, STEP_TIMEOUT),
        collectives=collectives,
        dispatch_window=dispatch_window(buffer, place) if place.leads else None,
        report=report,
    )


def card(loaded: Loaded, session: Path) -> RankCard:
    """What this rank publishes once it is loaded."""
    place = loaded.place
    pool = None
    if loaded.pool is not None:
        pool = PoolExport(
            instance=place.instance.name,
            rank=place.rank,
            address=loaded.pool.window.address,
            num_blocks=loaded.pool.num_blocks,
            layout=loaded.layout,
        )
    return RankCard(
        instance=place.instance.name,
        deployment=place.deployment.name,
        rank=place.rank,
        inbox=inbox_address(session, place.instance.name, place.rank),
        placement=loaded.placement.digest,
        agreement=loaded.agreement.open(),
        dispatch_window=loaded.dispatch_window.address if loaded.dispatch_window else None,
        staging_window=loaded.staging_window.address if loaded.staging_window else None,
        pool=pool,
    )


def assemble(
    flight: Preflight, loaded: Loaded, cards: list[RankCard], *, poison: bool, trace: bool
) -> RankEngine:
    """The engine of a loaded rank, connected to its peers."""
    place, deployment = loaded.place, loaded.place.deployment
    peers = [c for c in cards if c.instance == place.instance.name]
    clock = StepClock(trace=trace)
    leaders = [next(c for c in peers if c.rank == ranks.start) for ranks in place.nodes]
    connect_buffer(loaded.buffer, place, leaders[place.node].dispatch_window, clock)
    exchange = loaded.agreement.connect([c.agreement for c in leaders])
    if loaded.collectives is not None:
        loaded.collectives.where = clock
        exchange = TracedExchange(exchange, loaded.collectives)
    scheduler = Scheduler(
        scheduler_limits(
            deployment,
            max_positions=flight.model.max_positions,
            model=loaded.layout.model,
        )
    )
    return RankEngine(
        desk=_desk(flight, loaded, cards, scheduler, clock),
        scheduler=scheduler,
        decoder=loaded.decoder,
        kv_cache=loaded.kv_cache,
        exchange=exchange,
        limits=agree_limits(deployment),
        meter=loaded.buffer.meter,
        clock=clock,
        pipeline_depth=deployment.scheduler.pipeline_depth,
        poison=poison,
        budget=chunk_budget(deployment, flight.effective.slo),
    )


def _desk(
    flight: Preflight, loaded: Loaded, cards: list[RankCard], scheduler: Scheduler, clock: StepClock
) -> RequestDesk:
    place, deployment = loaded.place, loaded.place.deployment
    identity = _identity(loaded, cards)
    peers = [c for c in cards if c.instance == identity.instance]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToRank] = Inbox(context, identity.addresses[identity.instance, place.rank], ToRank)
    outbox = Outbox(context)
    tally = Tally(flight.model.num_moe_layers)
    reloader = Reloader(identity.instance, place.rank, loaded.decoder.tensors(), loaded.reader.reread)
    return RequestDesk(
        identity=identity,
        inbox=inbox,
        outbox=outbox,
        scheduler=scheduler,
        log=StepLog(
            instance=identity.instance,
            deployment=identity.deployment,
            rank=place.rank,
            num_moe_layers=flight.model.num_moe_layers,
        ),
        clock=clock,
        eos_token_ids=flight.model.eos_token_ids,
        handovers=Handovers(
            identity=identity,
            outbox=outbox,
            scheduler=scheduler,
            tally=tally,
            leases=Leases(LEASE_SECONDS),
            pool=loaded.pool,
            transport=_transport(loaded, cards),
            weights=lambda: reloader.version,
        ),
        promises=Promises(
            room_of(
                deployment.name,
                kv_tokens=deployment.kv_cache.blocks * deployment.kv_cache.block_tokens,
                max_sequences=deployment.scheduler.max_sequences,
            )
        ),
        tally=tally,
        experts=make_expert_desk(
            place,
            deployment.served(flight.model),
            placement=loaded.placement,
            load=loaded.load,
            table=loaded.table,
            registry=loaded.registry,
            reload=reloader,
            inboxes=[c.inbox for c in peers],
            staging=[c.staging_window for c in peers],
            outbox=outbox,
        ),
        structures=Structures(
            Path(flight.effective.model.path), flight.model.vocab_size, flight.model.eos_token_ids
        ),
    )


def _identity(loaded: Loaded, cards: list[RankCard]) -> Identity:
    """Who this rank is, and where all others are; those of its instance must hold its placement."""
    place, placement = loaded.place, loaded.placement.digest
    peers = [c for c in cards if c.instance == place.instance.name]
    differing = [c.rank for c in peers if c.placement != placement]
    assert not differing, f"ranks {differing} hold another placement than rank {place.rank}"
    return Identity(
        instance=place.instance.name,
        deployment=place.deployment.name,
        rank=place.rank,
        num_ranks=place.num_ranks,
        addresses={(c.instance, c.rank): c.inbox for c in cards},
    )


def _transport(loaded: Loaded, cards: list[RankCard]) -> HostTransport | None:
    """What a decode rank fetches KV with."""
    deployment = loaded.place.deployment
    if deployment.name != "decode":
        return None
    exports = [c.pool for c in cards if c.pool is not None]
    return HostTransport(loaded.kv_cache, deployment.kv.primary, loaded.layout, exports)
