"""The double's V1 normal mode: one row per (token, rank), sums per rank come back unweighted.

T tokens, K top-k, R ranks, H hidden, N received rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_runtime.errors import PeerLost, StepTimeout
from moe_runtime.spec.deepep_bytes import normal_buffer_bytes
from tests.expert_parallel.deepep.double import contracts, routing
from tests.expert_parallel.deepep.double.contracts import Rows, require
from tests.expert_parallel.deepep.double.events import DoubleEvent, after, garbage, outcome
from tests.expert_parallel.deepep.double.exchange import Arrival, DoubleGroup

MAX_TOP_K = 32
NORMAL_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


@dataclass(frozen=True, slots=True)
class DoubleConfig:
    """As `deep_ep.Config`, which is compiled: its methods take no keywords."""

    num_sms: int
    ranks: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        return normal_buffer_bytes(hidden=hidden_bytes // 2, ranks=num_ranks)[0]

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int, /) -> int:
        return normal_buffer_bytes(hidden=hidden_bytes // 2, ranks=num_ranks)[1]


@dataclass(frozen=True, slots=True)
class NormalHandle:
    """What DeepEP packs into a tuple nobody looks into."""

    layout: routing.Layout
    topk_idx_TK: Tensor
    weights_TK: Tensor
    experts: int
    per_source: tuple[int, ...]
    rows: int


def stream_rule(previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool) -> None:
    if allocate_on_comm_stream:
        require(
            previous_event is not None and async_finish,
            "allocate_on_comm_stream demands previous_event and async_finish",
        )


class NormalMode:
    """COLLECTIVE per call, in the same order on every rank."""

    def __init__(self, group: DoubleGroup, nvl_bytes: int, topk_idx_dtype: torch.dtype) -> None:
        self._group, self._nvl_bytes, self._ids = group, nvl_bytes, topk_idx_dtype

    def layout(self, topk_idx: Tensor, num_experts: int) -> routing.Layout:
        ranks = self._group.size()
        contracts.top_k(
            topk_idx, tokens=len(topk_idx), experts=num_experts, ranks=ranks, most=MAX_TOP_K, dtype=self._ids
        )
        return routing.layout(topk_idx, num_experts, ranks)

    def dispatch(
        self,
        x: Rows,
        *,
        given: tuple[Tensor | None, Tensor | None, Tensor | None],
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        expert_alignment: int,
        num_worst_tokens: int,
        previous_event: DoubleEvent | None,
        async_finish: bool,
    ) -> tuple[Any, ...]:
        """A dispatch that computes its layout; `given` is what the caller worked out with `layout`."""
        values, scales = self._rows(x)
        require(topk_idx is not None and topk_weights is not None, "topk_idx and topk_weights go together")
        assert topk_idx is not None
        assert topk_weights is not None
        per_rank, per_expert, in_rank = given
        require(
            per_rank is not None and per_expert is not None and in_rank is not None,
            "without a handle a dispatch needs what get_dispatch_layout returned",
        )
        assert per_rank is not None
        assert per_expert is not None
        assert in_rank is not None
        experts, ranks = len(per_expert), self._group.size()
        contracts.top_k(
            topk_idx, tokens=len(values), experts=experts, ranks=ranks, most=MAX_TOP_K, dtype=self._ids
        )
        contracts.weights(topk_weights, topk_idx)
        require(experts // ranks <= 1024, f"{experts // ranks} local experts, at most 1024 are allowed")
        how = routing.layout(topk_idx, experts, ranks)
        for name, is_given, real, dtype in (
            ("num_tokens_per_rank", per_rank, how.per_rank_R, torch.int32),
            ("num_tokens_per_expert", per_expert, how.per_expert_E, torch.int32),
            ("is_token_in_rank", in_rank, how.in_rank_TR, torch.bool),
        ):
            contracts.tensor(name, is_given, dtype=dtype, dim=real.dim())
            require(torch.equal(is_given, real), f"{name} is not that of topk_idx")
        after(previous_event)
        sent = routing.messages(values, scales, topk_idx, topk_weights, how, experts=experts)
        got = self._receive("dispatch", self._group.send("dispatch", sent), fp8=scales is not None)
        handle = NormalHandle(
            how, topk_idx.clone(), topk_weights.clone(), experts, got.per_source, len(got.x)
        )
        counts = torch.bincount(got.local_NK.flatten().long() + 1, minlength=experts // ranks + 1)[1:]
        listed = [-(-int(n) // expert_alignment) * expert_alignment for n in counts]
        rows = num_worst_tokens or len(got.x)
        require(rows >= len(got.x), f"num_worst_tokens = {rows}, but {len(got.x)} rows arrived")
        out_x, out_scales, out_ids, out_weights = self._outputs(got, rows)

        def complete() -> None:
            self._fill(got, out_x, out_scales)
            out_ids.fill_(-1)
            out_ids[: len(got.x)] = got.local_NK
            out_weights[: len(got.x)] = got.weights_NK

        event = outcome(complete, async_finish)
        out = out_x if out_scales is None else (out_x, out_scales)
        return out, out_ids, out_weights, [] if num_worst_tokens else listed, handle, event

    def cached_dispatch(
        self, x: Rows, handle: NormalHandle, *, previous_event: DoubleEvent | None, async_finish: bool
    ) -> tuple[Any, ...]:
        """The same rows to the same places once more."""
        require(isinstance(handle, NormalHandle), "handle is not what dispatch returned")
        values, scales = self._rows(x)
        require(len(values) == len(handle.topk_idx_TK), "x has another number of tokens than the handle")
        after(previous_event)
        sent = routing.messages(
            values, scales, handle.topk_idx_TK, handle.weights_TK, handle.layout, experts=handle.experts
        )
        got = self._receive("dispatch", self._group.send("dispatch", sent), fp8=scales is not None)
        out_x, out_scales, _, _ = self._outputs(got, len(got.x))
        event = outcome(lambda: self._fill(got, out_x, out_scales), async_finish)
        return (out_x if out_scales is None else (out_x, out_scales)), None, None, None, None, event

    def combine(
        self,
        x: Tensor,
        handle: NormalHandle,
        *,
        topk_weights: Tensor | None,
        bias: Tensor | tuple[Tensor, Tensor] | None,
        previous_event: DoubleEvent | None,
        async_finish: bool,
    ) -> tuple[Tensor, Tensor | None, DoubleEvent]:
        """Sums over ranks in fp32, without weights; `topk_weights` are only brought back likewise."""
        require(isinstance(handle, NormalHandle), "handle is not what dispatch returned")
        contracts.rows(x, multiple_of_bytes=16)
        require(not isinstance(x, tuple), "combine takes bf16 rows")
        require(len(x) == handle.rows, f"x has {len(x)} rows, the dispatch brought {handle.rows}")
        after(previous_event)
        T, K = handle.topk_idx_TK.shape
        parts = [x] if topk_weights is None else [x, topk_weights]
        if topk_weights is not None:
            contracts.tensor("topk_weights", topk_weights, dtype=torch.float32, dim=2)
            require(topk_weights.shape == (len(x), K), f"topk_weights must be [{len(x)}, {K}]")
        biases = bias if isinstance(bias, tuple) else () if bias is None else (bias,)
        for value in biases:
            contracts.tensor("bias", value, dtype=torch.bfloat16, dim=2)
            require(value.shape == (T, x.shape[1]), f"bias must be [{T}, {x.shape[1]}]")
        sent = list(zip(*(torch.split(p, list(handle.per_source)) for p in parts), strict=True))
        arrival = self._group.send("combine", sent)
        combined = garbage((T, x.shape[1]), torch.bfloat16)
        weights = None if topk_weights is None else garbage((T, K), torch.float32)

        def complete() -> None:
            back = _wait(arrival, "combine")
            total = torch.zeros(T, x.shape[1])
            for value in biases:
                total += value.float()
            gathered = torch.zeros(T, K)
            for rank, message in enumerate(back):
                here = handle.layout.in_rank_TR[:, rank]
                total[here] += message[0].float()
                if weights is not None:
                    gathered[here] += message[1]
            combined.copy_(total)
            if weights is not None:
                weights.copy_(gathered)

        event = outcome(complete, async_finish)
        return combined, weights, event

    def _rows(self, x: Rows) -> tuple[Tensor, Tensor | None]:
        require(self._nvl_bytes > 0, "the buffer was built without num_nvl_bytes: no normal mode")
        values, scales = contracts.rows(x, multiple_of_bytes=16)
        needed = normal_buffer_bytes(hidden=values.shape[1], ranks=self._group.size())[0]
        require(
            needed <= self._nvl_bytes,
            f"num_nvl_bytes = {self._nvl_bytes}, hidden {values.shape[1]} needs {needed}",
        )
        return values, scales

    def _receive(self, operation: str, arrival: Arrival, *, fp8: bool) -> routing.Received:
        return routing.received(_wait(arrival, operation), fp8=fp8)

    def _outputs(self, got: routing.Received, rows: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        K = got.local_NK.shape[1]
        scales = got.scales
        return (
            garbage((rows, got.x.shape[1]), got.x.dtype),
            None if scales is None else garbage((rows, scales.shape[1]), torch.float32),
            garbage((rows, K), got.local_NK.dtype),
            garbage((rows, K), torch.float32),
        )

    def _fill(self, got: routing.Received, out_x: Tensor, out_scales: Tensor | None) -> None:
        out_x[: len(got.x)] = got.x
        if out_scales is not None and got.scales is not None:
            out_scales[: len(got.x)] = got.scales


def _wait(arrival: Arrival, operation: str) -> list[list[Tensor]]:
    try:
        arrived = arrival.receive()
    except (StepTimeout, PeerLost) as error:
        if operation == "dispatch":
            raise RuntimeError("DeepEP error: CPU recv timeout") from error
        raise contracts.DeviceTrap("DeepEP timeout for combine") from error
    return [message for message in arrived if message is not None]
