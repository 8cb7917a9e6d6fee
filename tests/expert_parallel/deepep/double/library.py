"""The double as a library: what the adapter is given in place of `deep_ep`, and groups for it."""

from moe_runtime.expert_parallel.deepep.library import Library
from moe_runtime.expert_parallel.mailbox import Mailbox
from moe_runtime.shared_memory import Window, WindowAddress
from tests.expert_parallel.deepep.double.buffer import DoubleBuffer
from tests.expert_parallel.deepep.double.elastic import DoubleElasticBuffer
from tests.expert_parallel.deepep.double.exchange import DoubleGroup

AREA_BYTES = 64 << 20
"""What a rank may send in one call; pages that are never written take no memory."""


def double_library() -> Library:
    """The published call surface of DeepEP 2.1.0, on CPU."""
    return Library(
        version="double",
        buffer=DoubleBuffer,
        elastic_buffer=DoubleElasticBuffer,
        topk_idx_dtype=DoubleBuffer.topk_idx_dtype,
    )


def create_group_window(num_ranks: int) -> Window:
    """LOCAL: one per buffer; its creator publishes the address."""
    return Mailbox.create_window(num_ranks=num_ranks, area_bytes=AREA_BYTES)


def open_group(address: WindowAddress, *, rank: int, num_ranks: int, timeout: float) -> DoubleGroup:
    """LOCAL: a rank's end of the exchange of one buffer; `timeout` seconds is DeepEP's 100."""
    mailbox = Mailbox.open(address, rank=rank, num_ranks=num_ranks, area_bytes=AREA_BYTES, timeout=timeout)
    return DoubleGroup(mailbox)
