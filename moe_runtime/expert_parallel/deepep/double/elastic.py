"""DoubleElasticBuffer: an object shaped like DeepEP's V2 `ElasticBuffer`, expanding layout only.

    rows of expert i   [align(psum[i - 1]), psum[i])   then a gap up to the next multiple of the alignment

T tokens, K top-k, R ranks, E experts, L = E / R, M tokens per rank, N received rows, X expanded rows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_runtime.errors import PeerLost, StepTimeout
from moe_runtime.expert_parallel.deepep.double import contracts, routing
from moe_runtime.expert_parallel.deepep.double.contracts import breach, require
from moe_runtime.expert_parallel.deepep.double.events import DoubleEvent, after, garbage, outcome
from moe_runtime.expert_parallel.deepep.double.exchange import Arrival, DoubleGroup
from moe_runtime.spec.bytes import elastic_buffer_bytes

MAX_TOP_K = 32


@dataclass(slots=True, kw_only=True)
class DoubleEPHandle:
    """The fields of DeepEP's EPHandle that a caller may read; the last three are the double's own."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    layout: routing.Layout
    per_source: tuple[int, ...] = ()
    fill: list[Any] = field(default_factory=list)


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
        work = _Expansion(self, arrival, how, topk_idx.clone(), num_experts, expert_alignment or 1, M)
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
            lambda: self._sum(_wait(arrival, "combine"), handle, combined), async_with_compute_stream
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


class _Expansion:
    """A dispatch between its send and its receive: outputs of known size, contents to come."""

    def __init__(
        self,
        buffer: DoubleElasticBuffer,
        arrival: Arrival,
        how: routing.Layout,
        topk_idx: Tensor,
        experts: int,
        alignment: int,
        max_tokens: int,
    ) -> None:
        self._buffer, self._arrival = buffer, arrival
        self._got: routing.Received | None = None
        ranks = buffer.group.size()
        self._local, self._alignment = experts // ranks, alignment
        self._worst_rows = ranks * max_tokens
        worst = self._worst_rows * min(topk_idx.shape[1], self._local) + (alignment - 1) * self._local
        self._worst = -(-worst // alignment) * alignment
        self.handle = DoubleEPHandle(
            do_expand=True,
            num_experts=experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=max_tokens,
            topk_idx=topk_idx,
            num_recv_tokens=self._worst_rows,
            num_expanded_tokens=self._worst,
            num_recv_tokens_per_expert_list=[],
            psum_num_recv_tokens_per_scaleup_rank=garbage((ranks,), torch.int32),
            psum_num_recv_tokens_per_expert=garbage((self._local,), torch.int32),
            num_unaligned_recv_tokens_per_expert=garbage((self._local,), torch.int32),
            recv_src_metadata=torch.empty(0),
            layout=how,
        )

    def allocate(
        self, values: Tensor, scales: Tensor | None, *, exact: bool
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Outputs: as many rows as arrive (the host waits), or as could."""
        self._fp8 = scales is not None
        rows = self._worst
        if exact:
            self._receive()
            padded = [-(-n // self._alignment) * self._alignment for n in self._counts().tolist()]
            rows = sum(padded)
            assert self._got is not None
            self.handle.num_recv_tokens = len(self._got.x)
            self.handle.num_expanded_tokens = rows
            self.handle.num_recv_tokens_per_expert_list = padded
        return (
            garbage((rows, values.shape[1]), values.dtype),
            None if scales is None else garbage((rows, scales.shape[1]), scales.dtype),
            garbage((rows,), torch.float32),
        )

    def fill(self, x: Tensor, scales: Tensor | None, weights: Tensor, *, zero_gaps: bool) -> None:
        got, handle = self._receive(), self.handle
        counts, start = self._counts(), 0
        place_NK = torch.full(got.local_NK.shape, -1, dtype=torch.int32)
        for e, count in enumerate(counts.tolist()):
            row_C, k_C = (got.local_NK == e).nonzero(as_tuple=True)
            if not self._buffer.deterministic:
                order = torch.randperm(count, generator=self._buffer._order)
                row_C, k_C = row_C[order], k_C[order]
            end = start + count
            place_NK[row_C, k_C] = torch.arange(start, end, dtype=torch.int32)
            x[start:end], weights[start:end] = got.x[row_C], got.weights_NK[row_C, k_C]
            if scales is not None and got.scales is not None:
                scales[start:end] = got.scales[row_C]
            handle.psum_num_recv_tokens_per_expert[e] = end
            start = -(-end // self._alignment) * self._alignment
            if zero_gaps:
                x.view(torch.uint8)[end:start] = 0
        handle.num_unaligned_recv_tokens_per_expert.copy_(counts)
        handle.psum_num_recv_tokens_per_scaleup_rank.copy_(torch.tensor(got.per_source).cumsum(0))
        handle.per_source = got.per_source
        source_N = torch.repeat_interleave(torch.tensor(got.per_source)).int()
        head = [(source_N * handle.num_max_tokens_per_rank + got.token_N)[:, None], got.token_N[:, None]]
        handle.recv_src_metadata = torch.cat([*head, place_NK], dim=1)

    def _receive(self) -> routing.Received:
        if self._got is None:
            self._got = routing.received(_wait(self._arrival, "dispatch"), fp8=self._fp8)
        return self._got

    def _counts(self) -> Tensor:
        ids = self._receive().local_NK.flatten() + 1
        return torch.bincount(ids, minlength=self._local + 1)[1:]


def _buffer_bytes(group: DoubleGroup, max_tokens: int, hidden: int, top_k: int, fp8: bool) -> int:
    return elastic_buffer_bytes(
        max_tokens=max_tokens,
        hidden=hidden,
        top_k=top_k or MAX_TOP_K,
        ranks=group.size(),
        ranks_per_node=8,
        fp8=fp8,
    )


def _wait(arrival: Arrival, operation: str) -> list[list[Tensor]]:
    try:
        arrived = arrival.receive()
    except (StepTimeout, PeerLost) as error:
        raise contracts.DeviceTrap(f"DeepEP timeout for {operation}; version 2 masks no ranks") from error
    return [message for message in arrived if message is not None]
