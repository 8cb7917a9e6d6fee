"""The double's V1 low-latency mode: fixed places, two buffers in turn, a send phase and a receive hook.

    call n uses buffer n % 2, so call n - 2 must have been received; at most two results are alive: a
    dispatch's from its call to its combine, a combine's until it has been received

Messages hold one row per (token, expert). The order of source blocks at a receiver is shuffled, as it
is in DeepEP. T tokens, K top-k, R ranks, E experts, L = E / R, M tokens per rank, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_runtime.errors import PeerLost, StepTimeout
from moe_runtime.spec.deepep_bytes import low_latency_buffer_bytes
from tests.expert_parallel.deepep.double import contracts
from tests.expert_parallel.deepep.double.contracts import require
from tests.expert_parallel.deepep.double.events import garbage
from tests.expert_parallel.deepep.double.exchange import Arrival, DoubleGroup
from tests.expert_parallel.deepep.double.scales import allocate, cast, cast_scales

MAX_TOP_K = 11
HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
QP_DEPTH = 1024


@dataclass(slots=True, eq=False)
class Call:
    """One low-latency kernel: received or not, its result consumed or not."""

    kind: str
    received: bool = False
    alive: bool = True


@dataclass(frozen=True, slots=True)
class LowLatencyHandle:
    """src_info_LC int32, layout_range_LR int64 (begin << 32 | count), M, H, E.

    Beyond DeepEP's tuple, to check against: the ids dispatched, the call and its result.
    """

    topk_idx_TK: Tensor
    src_info_LC: Tensor
    layout_range_LR: Tensor
    max_tokens: int
    hidden: int
    experts: int
    call: Call
    recv_x: Tensor


class LowLatencyMode:
    """COLLECTIVE per call, in the same order on every rank."""

    def __init__(
        self, group: DoubleGroup, *, rdma_bytes: int, qps: int, shrink: bool, topk_idx_dtype: torch.dtype
    ) -> None:
        self._group, self._rdma_bytes, self._qps, self._shrink = group, rdma_bytes, qps, shrink
        self._ids = topk_idx_dtype
        self._calls: list[Call] = []
        self._combine_buffer: Tensor | None = None
        self.masked: set[int] = set()
        self.dirty = False
        self._order = torch.Generator().manual_seed(group.rank())

    # --- the calls

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        max_tokens: int,
        experts: int,
        *,
        stats: Tensor | None,
        fp8: bool,
        round_scale: bool,
        ue8m0: bool,
    ) -> tuple[Any, Tensor, LowLatencyHandle, Callable[[], None]]:
        """Send phase; (recv_x, counts, handle, receive phase)."""
        self._check_dispatch(x, topk_idx, max_tokens, experts, fp8, round_scale, ue8m0)
        ranks, H = self._group.size(), x.shape[1]
        L, C = experts // ranks, ranks * max_tokens
        if stats is not None:
            contracts.tensor("cumulative_local_expert_recv_stats", stats, dtype=torch.int32, dim=1)
            require(len(stats) == L, f"cumulative_local_expert_recv_stats must have {L} entries")
        call = self._start("dispatch")
        rows = cast(x, round_scale=round_scale) if fp8 else (x,)
        head = torch.tensor([max_tokens, H, experts, int(fp8)])
        sent = []
        for rank in range(ranks):
            token_N, k_N = (topk_idx.div(L, rounding_mode="floor") == rank).nonzero(as_tuple=True)
            if rank in self.masked:
                token_N, k_N = token_N[:0], k_N[:0]
            local_N = topk_idx[token_N, k_N].long() - rank * L
            sent.append([head, local_N.int(), token_N.int(), *(part[token_N] for part in rows)])
        arrival = self._group.send("low_latency_dispatch", sent)

        recv_x = garbage((L, C, H), torch.float8_e4m3fn if fp8 else torch.bfloat16)
        scales = allocate(L, C, H, ue8m0=ue8m0) if fp8 else None
        counts = garbage((L,), torch.int32)
        src_info, layout_range = garbage((L, C), torch.int32), garbage((L, ranks), torch.int64)
        handle = LowLatencyHandle(
            topk_idx.clone(), src_info, layout_range, max_tokens, H, experts, call, recv_x
        )

        def receive() -> None:
            arrived = self._receive(arrival, "dispatch")
            counts.zero_()
            layout_range.zero_()
            for source in torch.randperm(ranks, generator=self._order).tolist():
                message = arrived[source]
                if message is None:
                    continue
                require(
                    torch.equal(message[0], head),
                    f"rank {source} calls with (M, H, E, fp8) = {message[0].tolist()}, this rank with"
                    f" {head.tolist()}: they must agree",
                )
                local_N, token_N = message[1], message[2]
                for e in range(L):
                    of_e = (local_N == e).nonzero().flatten()
                    begin, count = int(counts[e]), len(of_e)
                    recv_x[e, begin : begin + count] = message[3][of_e]
                    if scales is not None:
                        scales[e, begin : begin + count] = cast_scales(message[4][of_e], ue8m0=ue8m0)
                    src_info[e, begin : begin + count] = token_N[of_e]
                    layout_range[e, source] = begin << 32 | count
                    counts[e] += count
            if stats is not None:
                stats.add_(counts)

        return (recv_x if scales is None else (recv_x, scales)), counts, handle, self._hook(call, receive)

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        *,
        zero_copy: bool,
        out: Tensor | None,
    ) -> tuple[Tensor, Callable[[], None]]:
        """Send phase of the rows of `handle`; (combined, receive phase that applies the weights)."""
        self._check_combine(x, topk_idx, topk_weights, handle, zero_copy, out)
        call = self._start("combine", consumes=handle.call)
        ranks, H = self._group.size(), handle.hidden
        L = handle.experts // ranks
        sent = [self._rows_for(x, handle, rank) for rank in range(ranks)]
        arrival = self._group.send("low_latency_combine", sent)
        handle.recv_x.copy_(garbage((1, 1, 1), handle.recv_x.dtype).expand_as(handle.recv_x))
        combined = garbage((len(topk_idx), H), torch.bfloat16) if out is None else out

        def receive() -> None:
            arrived = self._receive(arrival, "combine")
            total = torch.zeros(len(topk_idx), H)
            for k in range(topk_idx.shape[1]):
                for source, message in enumerate(arrived):
                    token_T = (topk_idx[:, k].div(L, rounding_mode="floor") == source).nonzero().flatten()
                    if message is None or source in self.masked or not len(token_T):
                        continue
                    local_N, token_N, rows = message
                    place = {
                        (int(e), int(t)): i for i, (e, t) in enumerate(zip(local_N, token_N, strict=True))
                    }
                    keys = [(int(topk_idx[t, k]) - source * L, int(t)) for t in token_T]
                    at = torch.tensor([place[key] for key in keys])
                    total[token_T] += rows[at].float() * topk_weights[token_T, k, None]
            combined.copy_(total)

        return combined, self._hook(call, receive)

    def next_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        require(isinstance(handle, LowLatencyHandle), "handle is not what low_latency_dispatch returned")
        L, C, H = handle.recv_x.shape
        self._combine_buffer = garbage((L, C, H), torch.bfloat16)
        return self._combine_buffer

    def clean(self) -> None:
        """Zero the signals; includes a barrier over all ranks."""
        self._calls.clear()
        self.dirty = False
        self._receive(self._group.send("clean", [[]] * self._group.size()), "clean")

    def mask(self, rank: int, mask: bool) -> None:
        require(self._shrink, "masking needs enable_shrink")
        require(0 <= rank < self._group.size(), f"rank {rank} is not in the group")
        (self.masked.add if mask else self.masked.discard)(rank)

    def query_mask(self, status: Tensor) -> None:
        require(self._shrink, "masking needs enable_shrink")
        contracts.tensor("mask_status", status, dtype=torch.int32, dim=1)
        require(len(status) == self._group.size(), f"mask_status must have {self._group.size()} entries")
        status.zero_()
        status[sorted(self.masked)] = 1

    # --- the order of calls

    def _start(self, kind: str, consumes: Call | None = None) -> Call:
        """A new kernel in the ring of two buffers; a combine takes the place of its dispatch."""
        if len(self._calls) >= 2:
            require(
                self._calls[-2].received,
                f"{kind}: the {self._calls[-2].kind} two calls ago has not been received, its buffer is"
                " taken again (call its hook first)",
            )
        if consumes is not None:
            consumes.alive = False
        alive = [c for c in self._calls if c.alive]
        require(len(alive) < 2, f"{kind}: two low-latency results are alive already")
        call = Call(kind)
        self._calls = [c for c in self._calls[:-1] if c.alive] + self._calls[-1:] + [call]
        return call

    def _hook(self, call: Call, receive: Callable[[], None]) -> Callable[[], None]:
        def hook() -> None:
            require(not call.received, f"the hook of a {call.kind} was called twice")
            receive()
            call.received = True
            if call.kind == "combine":
                call.alive = False

        return hook

    def _receive(self, arrival: Arrival, operation: str) -> list[list[Tensor] | None]:
        """Without masked ranks; a silent one is masked on time-out, or traps."""
        while True:
            try:
                return arrival.receive(without=frozenset(self.masked))
            except (StepTimeout, PeerLost) as error:
                silent = arrival.silent() - self.masked
                if not self._shrink or not silent:
                    raise contracts.DeviceTrap(f"DeepEP timeout for {operation} receive") from error
                self.masked |= silent

    def _rows_for(self, x: Tensor, handle: LowLatencyHandle, rank: int) -> list[Tensor]:
        """Expert, token and row of everything that came from `rank`."""
        L = x.shape[0]
        experts, tokens, rows = [], [], []
        for e in range(L):
            packed = int(handle.layout_range_LR[e, rank])
            begin, count = packed >> 32, packed & 0xFFFFFFFF
            experts.append(torch.full((count,), e, dtype=torch.int32))
            tokens.append(handle.src_info_LC[e, begin : begin + count])
            rows.append(x[e, begin : begin + count])
        return [torch.cat(experts), torch.cat(tokens), torch.cat(rows)]

    # --- the arguments

    def _check_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        M: int,  # noqa: N803
        E: int,  # noqa: N803
        fp8: bool,
        round_scale: bool,
        ue8m0: bool,
    ) -> None:
        ranks = self._group.size()
        require(not self.dirty, "normal-mode calls left the buffer dirty: clean_low_latency_buffer first")
        contracts.tensor("x", x, dtype=torch.bfloat16, dim=2)
        T, H = x.shape
        require(H in HIDDEN, f"hidden = {H} must be one of {HIDDEN}")
        require(M <= QP_DEPTH // 2 - 1, f"{M} tokens per rank, at most {QP_DEPTH // 2 - 1} are allowed")
        require(T <= M, f"x has {T} rows, num_max_dispatch_tokens_per_rank is {M}")
        require((ranks * M) % 4 == 0, f"ranks x tokens per rank = {ranks * M} must be a multiple of 4")
        contracts.top_k(topk_idx, tokens=T, experts=E, ranks=ranks, most=MAX_TOP_K, dtype=self._ids)
        require(E // ranks <= 1024, f"{E // ranks} local experts, at most 1024 are allowed")
        require(
            self._qps >= E // ranks, f"num_qps_per_rank = {self._qps} is below {E // ranks} local experts"
        )
        require(not fp8 or H % 512 == 0, f"hidden = {H} must be a multiple of 512 with fp8")
        require(not ue8m0 or (fp8 and round_scale), "use_ue8m0 needs use_fp8 and round_scale")
        needed = low_latency_buffer_bytes(max_tokens=M, hidden=H, slots=E)
        require(needed <= self._rdma_bytes, f"num_rdma_bytes = {self._rdma_bytes}, this call needs {needed}")

    def _check_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        zero_copy: bool,
        out: Tensor | None,
    ) -> None:
        require(isinstance(handle, LowLatencyHandle), "handle is not what low_latency_dispatch returned")
        require(handle.call.received, "combine before the dispatch was received: call its hook first")
        require(handle.call.alive, "the dispatch of this handle was combined already")
        contracts.tensor("x", x, dtype=torch.bfloat16, dim=3)
        shape = tuple(handle.recv_x.shape)
        require(tuple(x.shape) == shape, f"x must be {list(shape)}, it is {list(x.shape)}")
        contracts.top_k(
            topk_idx,
            tokens=len(topk_idx),
            experts=handle.experts,
            ranks=self._group.size(),
            most=MAX_TOP_K,
            dtype=self._ids,
        )
        require(torch.equal(topk_idx, handle.topk_idx_TK), "topk_idx is not what was dispatched")
        contracts.weights(topk_weights, topk_idx)
        require(len(topk_idx) <= handle.max_tokens, "more tokens than num_max_dispatch_tokens_per_rank")
        if zero_copy:
            buffer = self._combine_buffer
            require(
                buffer is not None and x.data_ptr() == buffer.data_ptr(),
                "zero_copy takes the tensor of get_next_low_latency_combine_buffer",
            )
        if out is not None:
            contracts.tensor("out", out, dtype=torch.bfloat16, dim=2)
            require(tuple(out.shape) == (len(topk_idx), handle.hidden), "out must be [tokens, hidden]")
