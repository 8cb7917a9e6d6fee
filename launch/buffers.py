"""The dispatch buffer of a rank, by the backend's name in the plan: its modes, and its node's window."""

import torch

from moe_runtime.expert_parallel.buffer import Buffer, Buffers
from moe_runtime.expert_parallel.collective import CollectiveBuffer
from moe_runtime.expert_parallel.local import LocalBuffer
from moe_runtime.expert_parallel.masked import MaskedBuffer
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.expert_parallel.shm import ShmBuffer, ShmSizes
from moe_runtime.expert_parallel.where import Where
from moe_runtime.launch.place import Place
from moe_runtime.launch.rendezvous import opening
from moe_runtime.plan.effective import EffectiveDeployment
from moe_runtime.shared_memory import Window, WindowAddress
from moe_runtime.spec.model import ModelSpec

RankBuffer = LocalBuffer | CollectiveBuffer | ShmBuffer


def make_buffer(
    model: ModelSpec,
    deployment: EffectiveDeployment,
    *,
    rank: int,
    slots_per_rank: int,
    device: torch.device,
    timeout: float,
) -> RankBuffer:
    """LOCAL for `local` and `shm` (which is then to be connected), COLLECTIVE for `torch`.

    `model` is what the deployment serves: shared experts may be slots.
    """
    dispatch = deployment.dispatch
    payload = None if dispatch.dtype == model.dtype else Payload(dispatch.dtype)
    if dispatch.backend == "local":
        return LocalBuffer(slots_per_rank=slots_per_rank, payload=payload, device=device)
    if dispatch.backend == "torch":
        return CollectiveBuffer(slots_per_rank=slots_per_rank, payload=payload, device=device)
    assert dispatch.backend == "shm", dispatch.backend
    sizes = ShmSizes(
        num_ranks=deployment.expert_parallel,
        slots_per_rank=slots_per_rank,
        hidden=model.hidden,
        top_k=model.moe.slots_per_token,
        max_tokens=dispatch.max_tokens,
        payload=Payload(dispatch.dtype),
        output_dtype=getattr(torch, model.dtype),
    )
    return ShmBuffer(sizes, rank=rank, timeout=timeout)


def by_mode(buffer: Buffer, deployment: EffectiveDeployment) -> Buffers:
    """What each dispatch mode of a deployment uses; rows of all modes travel through `buffer`."""
    capacity = deployment.expert_parallel * deployment.dispatch.max_tokens
    have: Buffers = {"normal": buffer, "low_latency": MaskedBuffer(buffer, capacity=capacity)}
    return {mode: have[mode] for mode in deployment.dispatch.modes}


def dispatch_window(buffer: RankBuffer, place: Place) -> Window | None:
    """LOCAL: what the ranks of a node share, made by its leader: rows, or only who has come to a dispatch."""
    if isinstance(buffer, ShmBuffer):
        return buffer.create_window()
    return buffer.create_window(len(place.here)) if isinstance(buffer, CollectiveBuffer) else None


def connect_buffer(buffer: RankBuffer, place: Place, address: WindowAddress | None, where: Where) -> None:
    """LOCAL: map the window that this node's leader published. PeerLost when the leader has ended."""
    if isinstance(buffer, LocalBuffer):
        return
    assert address is not None, "the node's leader made no window"
    with opening("dispatch window", place.here.start):
        if isinstance(buffer, ShmBuffer):
            buffer.connect(address, where=where)
        else:
            buffer.connect(address, here=place.here, where=where)
