"""Bytes of DeepEP's buffers, by the formulas of its sources: what its modes register for RDMA and NVLink.

Pure arithmetic; the adapters ask the library itself. E physical experts, H hidden, M tokens per rank and
dispatch, R ranks, K top-k.
"""

from collections.abc import Mapping
from types import MappingProxyType

LOW_LATENCY_LIMIT_BYTES = 32 * 2**30
"""Size beyond which operators found DeepEP's low-latency buffer refused."""


def _align(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def low_latency_buffer_bytes(*, max_tokens: int, hidden: int, slots: int) -> int:
    """DeepEP's low-latency buffer: 4 E M (H/128 x 4 + 2H) + 2 align128(4E).

    E counts physical experts, redundant ones included; independent of R. Two ping-pong buffers
    of a send and a receive half. Source: `get_low_latency_rdma_size_hint`, DeepEP 2.1.0.
    """
    row = hidden // 128 * 4 + 2 * hidden
    return 4 * slots * max_tokens * row + 2 * _align(4 * slots, 128)


# Channels and chunk sizes of DeepEP's tuned configurations with 20 SMs: ranks -> the larger of
# dispatch and combine: (NVLink receive tokens, RDMA send tokens that its ring is a multiple of).
_NORMAL_CHANNELS = 10
_NORMAL_CHUNKS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {r: (256, 6) for r in (2, 4, 8)}
    | {16: (288, 20)}
    | {r: (288, 8) for r in (24, 32, 48, 64)}
    | {96: (480, 12), 128: (560, 12), 144: (720, 12), 160: (720, 12)}
)


def normal_buffer_bytes(*, hidden: int, ranks: int) -> tuple[int, int]:
    """(NVLink bytes, RDMA bytes) of DeepEP's normal mode; KeyError for ranks without configuration.

    Per channel and peer: queue offsets, and chunks of rows with 8 bytes of source, room for 128 top-k
    ids (int64), weights and scales. RDMA keeps everything twice (send and receive) and 16 bytes more
    per row; 0 within a node. Rows in bf16. Source: `Config.get_nvl_buffer_size_hint` and
    `get_rdma_buffer_size_hint` over both tuned configurations, DeepEP 2.1.0.
    """
    nodes, peers = max(ranks // 8, 1), min(ranks, 8)
    nvlink_rows, rdma_send = _NORMAL_CHUNKS[ranks]
    row = 2 * hidden + 8 + 128 * (8 + 4 + 4)
    nvlink = _NORMAL_CHANNELS * peers * ((2 * nodes + 3) * 4 + nvlink_rows * row)
    if ranks <= 8:
        return _align(nvlink, 128), 0
    rdma_rows = _align(128, rdma_send)
    rdma = _NORMAL_CHANNELS * nodes * ((2 * 8 + 2) * 2 * 4 + rdma_rows * 2 * (row + 16))
    return _align(nvlink, 128), _align(rdma, 128)


def elastic_buffer_bytes(
    *, max_tokens: int, hidden: int, top_k: int, ranks: int, ranks_per_node: int, fp8: bool
) -> int:
    """Bytes of DeepEP's `ElasticBuffer` with several reductions allowed, a multiple of 2 MiB.

    The larger of what a dispatch and a combine hold. Within a node rows go straight to the receiver's
    R x M places; across nodes they are received once per node and once per rank. Source:
    `calculate_elastic_buffer_size` (NVLink inside a node, hybrid across nodes), DeepEP 2.1.0.
    """
    m, peers = max_tokens, min(ranks, ranks_per_node)
    nodes = -(-ranks // ranks_per_node)
    scales = _align(-(-hidden // 32) * 4, 32) if fp8 else 0
    metadata = _align(top_k * 8 + (1 + top_k) * 4, 32)
    sent = _align(hidden * (1 if fp8 else 2), 32) + scales + metadata
    back = _align(hidden * 2, 32) + _align(top_k * 8, 32)
    if nodes == 1:
        dispatch, combine = ranks * m, min(ranks, top_k) * m
    else:
        channels = 8 * 160
        dispatch = peers * nodes * m + m + nodes * (m + channels)
        combine = min(peers, top_k) * nodes * m + min(nodes, top_k) * m + nodes * (m + channels)
    return _align(max(dispatch * sent, combine * back), 2 << 20)


def low_latency_max_tokens(*, budget_bytes: int, hidden: int, slots: int, multiple_of: int = 1) -> int:
    """The most tokens per rank whose low-latency buffer fits `budget_bytes`; 0 if none does."""
    one = low_latency_buffer_bytes(max_tokens=1, hidden=hidden, slots=slots)
    fixed = low_latency_buffer_bytes(max_tokens=0, hidden=hidden, slots=slots)
    tokens = max(0, budget_bytes - fixed) // (one - fixed)
    return tokens // multiple_of * multiple_of
