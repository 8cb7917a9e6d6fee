"""DoubleBuffer: an object shaped like DeepEP's V1 `Buffer`, on CPU and shared memory.

Owns the call surface (names, order and defaults of arguments as published) and nothing of the work.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from moe_runtime.spec.deepep_bytes import low_latency_buffer_bytes
from tests.expert_parallel.deepep.double import contracts
from tests.expert_parallel.deepep.double.contracts import breach, require
from tests.expert_parallel.deepep.double.events import DoubleEvent, outcome
from tests.expert_parallel.deepep.double.exchange import DoubleGroup
from tests.expert_parallel.deepep.double.low_latency import LowLatencyHandle, LowLatencyMode
from tests.expert_parallel.deepep.double.normal import (
    NORMAL_RANKS,
    DoubleConfig,
    NormalHandle,
    NormalMode,
    stream_rule,
)

ALIGNMENT = 128
Hook = Callable[[], None]


class DoubleBuffer:
    """COLLECTIVE: every rank makes the same calls in the same order."""

    num_sms: ClassVar[int] = 20
    topk_idx_dtype: ClassVar[torch.dtype] = torch.int64

    def __init__(
        self,
        group: DoubleGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: object | None = None,
    ) -> None:
        require(group is not None, "either group or comm must be given; the double knows groups only")
        assert group is not None
        ranks = group.size()
        require(ranks < 8 or ranks % 8 == 0, f"{ranks} ranks: must be below 8 or a multiple of 8")
        for name, size in (("num_nvl_bytes", num_nvl_bytes), ("num_rdma_bytes", num_rdma_bytes)):
            require(size % ALIGNMENT == 0, f"{name} = {size} must be a multiple of {ALIGNMENT}")
        require(not low_latency_mode or num_qps_per_rank > 0, "num_qps_per_rank must be above 0")
        self.group, self.rank, self.group_size = group, group.rank(), ranks
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self._normal = NormalMode(group, num_nvl_bytes, self.topk_idx_dtype)
        self._low_latency = LowLatencyMode(
            group,
            rdma_bytes=num_rdma_bytes,
            qps=num_qps_per_rank,
            shrink=enable_shrink,
            topk_idx_dtype=self.topk_idx_dtype,
        )
        self._destroyed = False

    def destroy(self) -> None:
        require(self.explicitly_destroy, "explicitly_destroy must be set")
        self._destroyed = True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        require(new_num_sms % 2 == 0, "the SM count must be even")
        DoubleBuffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> DoubleEvent:
        return DoubleEvent()

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        size = low_latency_buffer_bytes(
            max_tokens=num_max_dispatch_tokens_per_rank, hidden=hidden, slots=num_experts
        )
        return size // ALIGNMENT * ALIGNMENT + ALIGNMENT  # 128 more even where it divides, as DeepEP

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> DoubleConfig:
        require(num_ranks in NORMAL_RANKS, f"unsupported number of EP ranks: {num_ranks}")
        return DoubleConfig(DoubleBuffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> DoubleConfig:
        return DoubleBuffer.get_dispatch_config(num_ranks)

    # --- normal mode

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: DoubleEvent | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, DoubleEvent]:
        stream_rule(previous_event, async_finish, allocate_on_comm_stream)
        how = self._normal.layout(topk_idx, num_experts)
        per_node = how.per_rank_R.view(-1, 8).sum(1).int() if self.group_size > 8 else None
        event = outcome(lambda: None, async_finish)
        return how.per_rank_R, per_node, how.per_expert_E, how.in_rank_TR, event

    def dispatch(
        self,
        x: contracts.Rows,
        handle: NormalHandle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: DoubleConfig | None = None,
        previous_event: DoubleEvent | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        self._prepare_normal(config, previous_event, async_finish, allocate_on_comm_stream)
        require(num_worst_tokens == 0 or self.group_size <= 8, "num_worst_tokens works within a node only")
        if handle is not None:
            require(topk_idx is None and topk_weights is None, "with a handle there is no topk_idx")
            return self._normal.cached_dispatch(
                x, handle, previous_event=previous_event, async_finish=async_finish
            )
        return self._normal.dispatch(
            x,
            given=(num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank),
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            previous_event=previous_event,
            async_finish=async_finish,
        )

    def combine(
        self,
        x: Tensor,
        handle: NormalHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: DoubleConfig | None = None,
        previous_event: DoubleEvent | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, DoubleEvent]:
        self._prepare_normal(config, previous_event, async_finish, allocate_on_comm_stream)
        return self._normal.combine(
            x,
            handle,
            topk_weights=topk_weights,
            bias=bias,
            previous_event=previous_event,
            async_finish=async_finish,
        )

    # --- low-latency mode

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        self._prepare_low_latency(async_finish=False, return_recv_hook=False)
        self._low_latency.clean()

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, LowLatencyHandle, DoubleEvent, Hook | None]:
        self._prepare_low_latency(async_finish, return_recv_hook)
        self._check_cost_stats(dispatch_wait_recv_cost_stats)
        recv_x, counts, handle, receive = self._low_latency.dispatch(
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            stats=cumulative_local_expert_recv_stats,
            fp8=use_fp8,
            round_scale=round_scale,
            ue8m0=use_ue8m0,
        )
        return recv_x, counts, handle, *_received(receive, async_finish, return_recv_hook)

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, DoubleEvent, Hook | None]:
        self._prepare_low_latency(async_finish, return_recv_hook)
        self._check_cost_stats(combine_wait_recv_cost_stats)
        require(not (zero_copy and use_logfmt), "zero_copy excludes use_logfmt")
        if use_logfmt:
            breach("the double does not model the 10-bit log format")
        combined, receive = self._low_latency.combine(
            x, topk_idx, topk_weights, handle, zero_copy=zero_copy, out=out
        )
        return combined, *_received(receive, async_finish, return_recv_hook)

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        return self._low_latency.next_combine_buffer(handle)

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        self._low_latency.mask(rank_to_mask, mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        self._low_latency.query_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        for rank in tuple(self._low_latency.masked):
            self._low_latency.mask(rank, False)

    # --- shared checks

    def _prepare_normal(
        self,
        config: DoubleConfig | None,
        previous_event: DoubleEvent | None,
        async_finish: bool,
        allocate_on_comm_stream: bool,
    ) -> None:
        require(not self._destroyed, "the buffer was destroyed")
        contracts.not_deterministic_with_fill()
        stream_rule(previous_event, async_finish, allocate_on_comm_stream)
        used = config or self.get_dispatch_config(self.group_size)
        require(used.ranks == self.group_size, f"the config is for {used.ranks} ranks")
        self._low_latency.dirty = True

    def _prepare_low_latency(self, async_finish: bool, return_recv_hook: bool) -> None:
        require(not self._destroyed, "the buffer was destroyed")
        require(self.low_latency_mode, "the buffer was built without low_latency_mode")
        contracts.not_deterministic_with_fill()
        require(
            not (async_finish and return_recv_hook), "async_finish and return_recv_hook exclude each other"
        )

    def _check_cost_stats(self, stats: Tensor | None) -> None:
        if stats is not None:
            contracts.tensor("wait_recv_cost_stats", stats, dtype=torch.int64, dim=1)
            require(
                len(stats) == self.group_size, f"wait_recv_cost_stats must have {self.group_size} entries"
            )


def _received(receive: Hook, async_finish: bool, return_recv_hook: bool) -> tuple[DoubleEvent, Hook | None]:
    """(event, hook): either the caller receives, or an event does, or it happens now."""
    if return_recv_hook:
        return DoubleEvent(recorded=False), receive
    return outcome(receive, async_finish), None
