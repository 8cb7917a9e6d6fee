"""The double's V2 dispatch between its send and its receive: rows grouped by expert, aligned starts.

    rows of expert i   [align(psum[i - 1]), psum[i])   then a gap up to the next multiple of the alignment

K top-k, R ranks, E experts, L = E / R, M tokens per rank, N received rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_runtime.errors import PeerLost, StepTimeout
from tests.expert_parallel.deepep.double import contracts, routing
from tests.expert_parallel.deepep.double.events import garbage
from tests.expert_parallel.deepep.double.exchange import Arrival


@dataclass(slots=True, kw_only=True)
class DoubleEPHandle:
    """The fields of DeepEP's EPHandle that a caller may read; the last two are the double's own."""

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


class Expansion:
    """A dispatch between its send and its receive: outputs of known size, contents to come."""

    def __init__(
        self,
        arrival: Arrival,
        how: routing.Layout,
        topk_idx: Tensor,
        experts: int,
        alignment: int,
        max_tokens: int,
        *,
        shuffle: torch.Generator | None,
    ) -> None:
        """`shuffle`: the order of rows within an expert, unless it has to be (source rank, token)."""
        self._arrival, self._shuffle = arrival, shuffle
        self._got: routing.Received | None = None
        ranks = how.in_rank_TR.shape[1]
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
            if self._shuffle is not None:
                order = torch.randperm(count, generator=self._shuffle)
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
            self._got = routing.received(wait(self._arrival, "dispatch"), fp8=self._fp8)
        return self._got

    def _counts(self) -> Tensor:
        ids = self._receive().local_NK.flatten() + 1
        return torch.bincount(ids, minlength=self._local + 1)[1:]


def wait(arrival: Arrival, operation: str) -> list[list[Tensor]]:
    try:
        arrived = arrival.receive()
    except (StepTimeout, PeerLost) as error:
        raise contracts.DeviceTrap(f"DeepEP timeout for {operation}; version 2 masks no ranks") from error
    return [message for message in arrived if message is not None]
