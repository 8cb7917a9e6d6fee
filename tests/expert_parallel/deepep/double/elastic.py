"""DoubleElasticBuffer: an object shaped like DeepEP's V2 `ElasticBuffer`, expanding layout only.

T tokens, K top-k, R ranks, E experts, L = E / R, M tokens per rank, N received rows.
"""

from typing import Any

import torch
from torch import Tensor

from moe_runtime.spec.deepep_bytes import elastic_buffer_bytes
from tests.expert_parallel.deepep.double import contracts, routing
from tests.expert_parallel.deepep.double.contracts import breach, require
from tests.expert_parallel.deepep.double.events import DoubleEvent, after, garbage, outcome
from tests.expert_parallel.deepep.double.exchange import DoubleGroup
from tests.expert_parallel.deepep.double.expansion import DoubleEPHandle, Expansion, wait

MAX_TOP_K = 32


class DoubleElasticBuffer:
    """COLLECTIVE: every rank makes the same calls in the same order."""

    def __init__(
        self,
        group: DoubleGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        require(group.size() <= 1024, f"{group.size()} ranks, at most 1024 are allowed")
        if num_bytes is None:
            require(num_max_tokens_per_rank > 0 and hidden > 0, "give num_bytes, or tokens and hidden size")
            num_bytes = _buffer_bytes(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        require(num_bytes % (2 << 20) == 0, f"num_bytes = {num_bytes} must be a multiple of 2 MiB")
        self.group, self.num_bytes, self.deterministic = group, num_bytes, deterministic
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.allow_multiple_reduction = allow_multiple_reduction
        self.explicitly_destroy = explicitly_destroy
        self._order = torch.Generator().manual_seed(group.rank())
        self._destroyed = False

    def destroy(self) -> None:
        require(self.explicitly_destroy, "explicitly_destroy must be set")
        self._destroyed = True

    @staticmethod
    def capture() -> DoubleEvent:
        return DoubleEvent()

    @staticmethod
    def get_buffer_size_hint(
        group: DoubleGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        return _buffer_bytes(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)

    def dispatch(
        self,
        x: contracts.Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: DoubleEvent | None = None,
        previous_event_before_epilogue: DoubleEvent | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: DoubleEPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, None, Tensor | None, DoubleEPHandle, DoubleEvent]:
        self._rules(previous_event, allocate_on_comm_stream)
        require(not do_zero_padding or do_expand, "do_zero_padding needs do_expand")
        if not do_expand or handle is not None or use_tma_aligned_col_major_sf:
            breach("the double models do_expand without a cached handle, scales in rows")
        values, scales = contracts.rows(x, multiple_of_bytes=32)
        T, M = len(values), num_max_tokens_per_rank or self.num_max_tokens_per_rank
        self._check_dispatch(values, scales, topk_idx, topk_weights, num_experts, M)
        assert topk_idx is not None
        assert topk_weights is not None
        assert num_experts is not None
        require(T <= M, f"x has {T} rows, num_max_tokens_per_rank is {M}")
        L = num_experts // self.group.size()
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            contracts.tensor("cumulative_local_expert_recv_stats", stats, dtype=torch.int32, dim=1)
            require(len(stats) == L, f"cumulative_local_expert_recv_stats must have {L} entries")
        after(previous_event)
        how = routing.layout(topk_idx, num_experts, self.group.size())
        sent = routing.messages(values, scales, topk_idx, topk_weights, how, experts=num_experts)
        arrival = self.group.send("dispatch", sent)
        work = Expansion(
            arrival,
            how,
            topk_idx.clone(),
            num_experts,
            expert_alignment or 1,
            M,
            shuffle=None if self.deterministic else self._order,
        )
        sync = do_cpu_sync is None or do_cpu_sync
        out_x, out_scales, out_weights = work.allocate(values, scales, exact=sync)

        def complete() -> None:
            work.fill(out_x, out_scales, out_weights, zero_gaps=do_zero_padding)
            if stats is not None:
                stats.add_(work.handle.num_unaligned_recv_tokens_per_expert)

        event = outcome(complete, async_with_compute_stream)
        out = out_x if out_scales is None else (out_x, out_scales)
        return out, None, out_weights, work.handle, event

    def combine(
        self,
        x: Tensor,
        handle: DoubleEPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: DoubleEvent | None = None,
        previous_event_before_epilogue: DoubleEvent | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, DoubleEvent]:
        """Unweighted: sums in fp32 per rank, rounded to bf16, then over ranks; or at once at the source."""
        self._rules(previous_event, allocate_on_comm_stream)
        require(isinstance(handle, DoubleEPHandle), "handle is not what dispatch returned")
        contracts.tensor("x", x, dtype=torch.bfloat16, dim=2)
        require(x.shape[1] % 256 == 0, f"hidden = {x.shape[1]} must be a multiple of 256 in combine")
        rows = handle.num_expanded_tokens
        require(len(x) == rows, f"x has {len(x)} rows, the dispatch brought {rows}")
        if topk_weights is not None or bias is not None:
            breach("the double models combine without topk_weights and bias")
        after(previous_event)
        places = torch.split(handle.recv_src_metadata[:, 2:], list(handle.per_source))
        sent = [self._back(x, part) for part in places]
        arrival = self.group.send("combine", [[rows] for rows in sent])
        combined = garbage((len(handle.topk_idx), x.shape[1]), torch.bfloat16)
        event = outcome(
            lambda: self._sum(wait(arrival, "combine"), handle, combined), async_with_compute_stream
        )
        return combined, None, event

    def _back(self, x: Tensor, place_NK: Tensor) -> Tensor:
        """What goes back to one source: [N, H] summed, or [N, K, H] as it is."""
        exists = place_NK >= 0
        rows = torch.where(exists[..., None], x[place_NK.clamp(min=0).long()].float(), 0.0)
        if not self.allow_multiple_reduction:
            return rows.to(x.dtype)
        total = torch.zeros(len(rows), x.shape[1])
        for k in range(place_NK.shape[1]):
            total += rows[:, k]
        return total.to(x.dtype)

    def _sum(self, back: list[list[Tensor]], handle: DoubleEPHandle, combined: Tensor) -> None:
        total = torch.zeros(combined.shape)
        if self.allow_multiple_reduction:
            for rank, (rows,) in enumerate(back):
                total[handle.layout.in_rank_TR[:, rank]] += rows.float()
        else:
            per_k = torch.zeros(*handle.topk_idx.shape, combined.shape[1])
            for rank, (rows,) in enumerate(back):
                per_k[handle.layout.in_rank_TR[:, rank]] += rows.float()
            for k in range(per_k.shape[1]):
                total += per_k[:, k]
        combined.copy_(total)

    def _rules(self, previous_event: DoubleEvent | None, allocate_on_comm_stream: bool) -> None:
        require(not self._destroyed, "the buffer was destroyed")
        contracts.not_deterministic_with_fill()
        if previous_event is not None:
            require(allocate_on_comm_stream, "previous_event demands allocate_on_comm_stream")

    def _check_dispatch(
        self,
        values: Tensor,
        scales: Tensor | None,
        topk_idx: Tensor | None,
        topk_weights: Tensor | None,
        num_experts: int | None,
        max_tokens: int,
    ) -> None:
        require(
            topk_idx is not None and num_experts is not None,
            "without a handle a dispatch needs topk_idx and num_experts",
        )
        assert topk_idx is not None
        assert num_experts is not None
        require(topk_weights is not None, "the double models dispatches with topk_weights")
        assert topk_weights is not None
        ranks = self.group.size()
        contracts.top_k(
            topk_idx,
            tokens=len(values),
            experts=num_experts,
            ranks=ranks,
            most=MAX_TOP_K,
            dtype=torch.int64,
        )
        contracts.weights(topk_weights, topk_idx)
        require(num_experts <= 2048, f"{num_experts} experts, at most 2048 are allowed")
        require(num_experts // ranks <= 256, f"{num_experts // ranks} local experts, at most 256 are allowed")
        needed = _buffer_bytes(self.group, max_tokens, values.shape[1], topk_idx.shape[1], scales is not None)
        require(needed <= self.num_bytes, f"the buffer has {self.num_bytes} bytes, this call needs {needed}")


def _buffer_bytes(group: DoubleGroup, max_tokens: int, hidden: int, top_k: int, fp8: bool) -> int:
    return elastic_buffer_bytes(
        max_tokens=max_tokens,
        hidden=hidden,
        top_k=top_k or MAX_TOP_K,
        ranks=group.size(),
        ranks_per_node=8,
        fp8=fp8,
    )
