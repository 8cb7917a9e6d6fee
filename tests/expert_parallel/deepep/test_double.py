"""The double itself: its semantics are DeepEP's, and every stated demand is refused when broken."""

from typing import Any

import pytest
import torch

from tests.expert_parallel.deepep.deepep_ranks import run_ranks
from tests.expert_parallel.deepep.double.buffer import DoubleBuffer
from tests.expert_parallel.deepep.double.contracts import ContractBreach, DeviceTrap
from tests.expert_parallel.deepep.double.elastic import DoubleElasticBuffer
from tests.expert_parallel.deepep.double.scales import cast

RANKS, E, M, K, H, LL_H = 2, 4, 4, 2, 128, 2048
MIB = 1 << 20


def normal_buffer(group):
    nvl = DoubleBuffer.get_dispatch_config(group.size()).get_nvl_buffer_size_hint(2 * H, group.size())
    return DoubleBuffer(group, num_nvl_bytes=nvl)


def low_latency_buffer(group, **more):
    size = DoubleBuffer.get_low_latency_rdma_size_hint(M, LL_H, group.size(), E)
    return DoubleBuffer(group, num_rdma_bytes=size, low_latency_mode=True, **more)


def elastic_buffer(group, **more):
    return DoubleElasticBuffer(group, num_max_tokens_per_rank=M, hidden=256, num_topk=K, **more)


def inputs(hidden=LL_H, tokens=3):
    g = torch.Generator().manual_seed(0)
    ids = torch.rand(tokens, E, generator=g).argsort(1)[:, :K].contiguous()
    weights = torch.rand(tokens, K, generator=g)
    return torch.randn(tokens, hidden, generator=g).bfloat16(), ids, weights


def ll_dispatch(buffer, **changes):
    x, ids, _ = inputs()
    arguments = {"x": x, "topk_idx": ids, "num_max_dispatch_tokens_per_rank": M, "num_experts": E}
    return buffer.low_latency_dispatch(**{**arguments, "use_fp8": False, "return_recv_hook": True, **changes})


def normal_dispatch(buffer, **changes):
    x, ids, weights = inputs(H)
    ids = changes.get("topk_idx", ids)
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, E)
    arguments = {
        "x": x,
        "num_tokens_per_rank": per_rank,
        "is_token_in_rank": in_rank,
        "num_tokens_per_expert": per_expert,
        "topk_idx": ids,
        "topk_weights": weights,
    }
    return buffer.dispatch(**{**arguments, **changes})


def v2_dispatch(buffer, **changes):
    x, ids, weights = inputs(256)
    arguments = {"x": x, "topk_idx": ids, "topk_weights": weights, "num_experts": E, "do_expand": True}
    return buffer.dispatch(**{**arguments, **changes})


def refused(work, words, ranks=RANKS, timeout=1.0):
    with pytest.raises(ContractBreach, match=words):
        run_ranks(ranks, work, timeout=timeout)


def twice(ids):
    ids = ids.clone()
    ids[0, 1] = ids[0, 0]
    return ids


X, IDS, WEIGHTS = inputs()
NX, _, _ = inputs(H)
EX, _, _ = inputs(256)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": X.float()}, "x must be torch.bfloat16, it is torch.float32"),
        ({"x": X.t().contiguous().t()}, "x must be contiguous"),
        ({"x": X[None]}, "x must have 2 dimensions"),
        ({"x": X[:, :1536].contiguous()}, "hidden = 1536 must be one of"),
        ({"x": X[:2].contiguous()}, "topk_idx has 3 rows, x has 2"),
        ({"topk_idx": IDS.int()}, "topk_idx must be torch.int64"),
        ({"topk_idx": IDS + 2}, r"topk_idx holds ids in 2..5, allowed are -1..3"),
        ({"topk_idx": twice(IDS)}, "experts of a token must be distinct"),
        ({"topk_idx": torch.arange(36).view(3, 12)}, "top-k = 12 must be at most 11"),
        ({"num_experts": 5}, "num_experts = 5 must be a multiple of the 2 ranks"),
        ({"num_experts": 2 * 1026}, "1026 local experts, at most 1024"),
        ({"num_experts": 64}, "num_qps_per_rank = 24 is below 32 local experts"),
        ({"num_max_dispatch_tokens_per_rank": 2}, "x has 3 rows, num_max_dispatch_tokens_per_rank is 2"),
        ({"num_max_dispatch_tokens_per_rank": 3}, "= 6 must be a multiple of 4"),
        ({"num_max_dispatch_tokens_per_rank": 512}, "512 tokens per rank, at most 511"),
        ({"num_max_dispatch_tokens_per_rank": 64}, "this call needs"),
        ({"use_ue8m0": True, "use_fp8": True}, "use_ue8m0 needs use_fp8 and round_scale"),
        ({"async_finish": True}, "async_finish and return_recv_hook exclude each other"),
        (
            {"cumulative_local_expert_recv_stats": torch.zeros(2)},
            "recv_stats must be torch.int32",
        ),
        (
            {"dispatch_wait_recv_cost_stats": torch.zeros(2, 2, dtype=torch.int64)},
            "must have 1 dimensions",
        ),
    ],
)
def test_low_latency_dispatch_refuses(changes, words):
    refused(lambda group: ll_dispatch(low_latency_buffer(group), **changes), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(2, 8, LL_H)}, "x must be torch.bfloat16"),
        ({"x": torch.zeros(2, 4, LL_H).bfloat16()}, r"x must be \[2, 8, 2048\]"),
        ({"topk_weights": WEIGHTS.double()}, "topk_weights must be torch.float32"),
        ({"topk_weights": WEIGHTS[:2]}, "topk_weights must have the shape of topk_idx"),
        ({"topk_idx": IDS.flip(1)}, "topk_idx is not what was dispatched"),
        ({"handle": ("src_info",)}, "handle is not what low_latency_dispatch returned"),
        ({"zero_copy": True}, "zero_copy takes the tensor of"),
        ({"zero_copy": True, "use_logfmt": True}, "zero_copy excludes use_logfmt"),
        ({"out": torch.zeros(2, LL_H).bfloat16()}, r"out must be \[tokens, hidden\]"),
        ({"async_finish": True}, "async_finish and return_recv_hook exclude each other"),
    ],
)
def test_low_latency_combine_refuses(changes, words):
    def work(group):
        buffer = low_latency_buffer(group)
        recv, _, handle, _, hook = ll_dispatch(buffer)
        hook()
        arguments = {"x": recv, "topk_idx": IDS, "topk_weights": WEIGHTS, "handle": handle}
        buffer.low_latency_combine(**{**arguments, "return_recv_hook": True, **changes})

    refused(work, words)


def test_hooks_are_called_once_and_before_the_combine():
    def twice_called(group):
        hook = ll_dispatch(low_latency_buffer(group))[4]
        hook()
        hook()

    refused(twice_called, "hook of a dispatch was called twice")

    def never_called(group):
        buffer = low_latency_buffer(group)
        recv, _, handle, _, _ = ll_dispatch(buffer)
        buffer.low_latency_combine(recv, IDS, WEIGHTS, handle, return_recv_hook=True)

    refused(never_called, "combine before the dispatch was received")

    def combined_twice(group):
        buffer = low_latency_buffer(group)
        recv, _, handle, _, hook = ll_dispatch(buffer)
        hook()
        for _ in range(2):
            buffer.low_latency_combine(recv.clone(), IDS, WEIGHTS, handle, return_recv_hook=True)[2]()

    refused(combined_twice, "was combined already")


def test_at_most_two_low_latency_results_are_alive():
    def three(group):
        buffer = low_latency_buffer(group)
        for _ in range(3):
            ll_dispatch(buffer)[4]()

    refused(three, "two low-latency results are alive already")

    def overtaken(group):
        """The second dispatch is not received when the ring comes round to its buffer."""
        buffer = low_latency_buffer(group)
        recv, _, handle, _, hook = ll_dispatch(buffer)
        ll_dispatch(buffer)
        hook()
        buffer.low_latency_combine(recv, IDS, WEIGHTS, handle, return_recv_hook=True)[2]()
        ll_dispatch(buffer)

    refused(overtaken, "two calls ago has not been received")


def test_a_result_is_gone_once_it_was_combined():
    def work(group):
        buffer = low_latency_buffer(group)
        recv, counts, handle, _, hook = ll_dispatch(buffer)
        assert bool(recv.isnan().all())
        assert int(counts.max()) < 0
        hook()
        valid = torch.arange(8)[None] < counts[:, None]
        assert bool(recv[valid].isfinite().all())
        combined, _, hook = buffer.low_latency_combine(recv, IDS, WEIGHTS, handle, return_recv_hook=True)
        assert bool(combined.isnan().all())
        assert bool(recv.isnan().all())
        hook()
        return combined

    for got in run_ranks(RANKS, work):
        # identity experts: the weighted sum is x times the sum of the weights, rounded once
        assert torch.allclose(got.float(), X.float() * WEIGHTS.sum(1, keepdim=True), rtol=2**-8)


def test_low_latency_without_hook_and_with_event():
    def work(group):
        buffer = low_latency_buffer(group)
        recv, _, handle, event, hook = ll_dispatch(buffer, return_recv_hook=False)
        assert hook is None
        with pytest.raises(ContractBreach, match="its event is empty"):
            event.current_stream_wait()
        combined, event, _ = buffer.low_latency_combine(recv, IDS, WEIGHTS, handle, async_finish=True)
        assert bool(combined.isnan().all())
        event.current_stream_wait()
        return combined

    assert all(bool(got.isfinite().all()) for got in run_ranks(RANKS, work))


@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("round_scale", [False, True])
def test_fp8_scales_are_laid_out_column_by_column(ue8m0, round_scale):
    if ue8m0 and not round_scale:
        round_scale = True

    def work(group):
        buffer = low_latency_buffer(group)
        result = ll_dispatch(buffer, use_fp8=True, round_scale=round_scale, use_ue8m0=ue8m0)
        result[4]()
        return result

    for rank, ((values, scales), counts, handle, _, _) in enumerate(run_ranks(RANKS, work)):
        assert values.shape == (2, 8, LL_H)
        assert values.dtype == torch.float8_e4m3fn
        groups = LL_H // (512 if ue8m0 else 128)
        assert scales.shape == (2, 8, groups)
        assert scales.stride() == (groups * 8, 1, 8)
        assert scales.dtype == (torch.int32 if ue8m0 else torch.float32)
        real_values, real_scales = cast(X, round_scale=round_scale)
        for e in range(2):
            count = int(counts[e])
            assert count == 2 * int((2 * rank + e == IDS).sum())
            tokens = handle.src_info_LC[e, :count].long()
            assert torch.equal(values[e, :count].float(), real_values[tokens].float())
            got = scales[e, :count].clone(memory_format=torch.contiguous_format)
            if ue8m0:
                got = torch.exp2(got.view(torch.uint8).view(count, LL_H // 128).float() - 127)
            assert torch.equal(got, real_scales[tokens])
        back = values[0, : int(counts[0])].float().view(-1, LL_H // 128, 128)
        assert bool((back.abs().amax(-1) <= 448).all())


def test_layout_ranges_name_the_rows_of_each_source():
    def work(group):
        result = ll_dispatch(low_latency_buffer(group))
        result[4]()
        return result

    orders = set()
    for _, counts, handle, _, _ in run_ranks(RANKS, work):
        for e in range(2):
            ranges = sorted((int(v) >> 32, int(v) & 0xFFFFFFFF) for v in handle.layout_range_LR[e])
            assert ranges[0][0] == 0
            assert ranges[1][0] == ranges[0][1]
            assert sum(count for _, count in ranges) == int(counts[e])
            orders.add(int(handle.layout_range_LR[e, 0]) >> 32 == 0)
    assert orders == {True, False}  # source blocks come in no fixed order


def test_ranks_that_disagree_are_told():
    def work(group):
        tokens = M if group.rank() else M // 2
        x, ids, _ = inputs(tokens=2)
        ll_dispatch(low_latency_buffer(group), x=x, topk_idx=ids, num_max_dispatch_tokens_per_rank=tokens)[
            4
        ]()

    refused(work, "they must agree")


def test_normal_calls_leave_the_low_latency_buffer_dirty():
    def work(group, clean):
        nvl = DoubleBuffer.get_dispatch_config(2).get_nvl_buffer_size_hint(2 * H, 2)
        size = DoubleBuffer.get_low_latency_rdma_size_hint(M, LL_H, 2, E)
        buffer = DoubleBuffer(group, num_nvl_bytes=nvl, num_rdma_bytes=size, low_latency_mode=True)
        normal_dispatch(buffer)
        if clean:
            buffer.clean_low_latency_buffer(M, LL_H, E)
        ll_dispatch(buffer)[4]()

    refused(lambda group: work(group, clean=False), "clean_low_latency_buffer first")
    run_ranks(RANKS, lambda group: work(group, clean=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": NX.float()}, "x must be torch.bfloat16"),
        ({"x": NX[:, :4].contiguous()}, "a row of x has 8 bytes, no multiple of 16"),
        ({"x": (NX.to(torch.float8_e4m3fn), torch.zeros(3, 2))}, r"scales must be \[3, 1\]"),
        ({"x": (NX.to(torch.float8_e4m3fn), torch.zeros(3, 1).double())}, "scales must be fp32"),
        (
            {"x": (NX[:, :64].to(torch.float8_e4m3fn), torch.zeros(3, 1))},
            "must be a multiple of 128 with fp8",
        ),
        ({"topk_weights": None}, "topk_idx and topk_weights go together"),
        ({"topk_weights": WEIGHTS.double()}, "topk_weights must be torch.float32"),
        ({"num_tokens_per_rank": None}, "needs what get_dispatch_layout returned"),
        ({"num_tokens_per_rank": torch.tensor([9, 9], dtype=torch.int32)}, "is not that of topk_idx"),
        ({"num_tokens_per_expert": torch.ones(E)}, "num_tokens_per_expert must be torch.int32"),
        ({"is_token_in_rank": torch.ones(3, 2)}, "is_token_in_rank must be torch.bool"),
        ({"allocate_on_comm_stream": True}, "demands previous_event and async_finish"),
        ({"num_worst_tokens": 1}, "num_worst_tokens = 1, but"),
        ({"topk_idx": twice(IDS)}, "experts of a token must be distinct"),
    ],
)
def test_normal_dispatch_refuses(changes, words):
    refused(lambda group: normal_dispatch(normal_buffer(group), **changes), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(1, H).bfloat16()}, "x has 1 rows, the dispatch brought"),
        ({"x": torch.zeros(6, H)}, "x must be torch.bfloat16"),
        ({"handle": ("tuple",)}, "handle is not what dispatch returned"),
        ({"topk_weights": torch.zeros(1, K)}, "topk_weights must be"),
        ({"bias": torch.zeros(2, H).bfloat16()}, r"bias must be \[3, 128\]"),
        ({"allocate_on_comm_stream": True, "async_finish": True}, "demands previous_event and async_finish"),
    ],
)
def test_normal_combine_refuses(changes, words):
    def work(group):
        buffer = normal_buffer(group)
        x, _, _, _, handle, _ = normal_dispatch(buffer)
        buffer.combine(**{"x": x, "handle": handle, **changes})

    refused(work, words)


def test_normal_rows_ids_counts_and_cached_handle():
    def work(group):
        buffer = normal_buffer(group)
        x, ids, weights, counts, handle, _ = normal_dispatch(buffer, expert_alignment=16)
        again, *nothing, _ = buffer.dispatch(x=NX * 2, handle=handle)
        assert nothing == [None] * 4
        worst = normal_dispatch(buffer, num_worst_tokens=8)
        return x, ids, weights, counts, again, worst

    for rank, (x, ids, weights, counts, again, worst) in enumerate(run_ranks(RANKS, work)):
        here = (rank == IDS // 2).any(1).nonzero().flatten()
        assert torch.equal(x, torch.cat([NX[here], NX[here]]))  # once per token, source rank by source rank
        assert torch.equal(again, x * 2)
        local = torch.where(rank == IDS // 2, IDS - 2 * rank, -1)[here]
        assert torch.equal(ids, torch.cat([local, local]))
        assert torch.equal(weights[: len(here)], torch.where(local >= 0, WEIGHTS[here], 0.0))
        assert counts == [16 if bool((local == e).any()) else 0 for e in range(2)]
        assert worst[3] == []
        assert worst[0].shape[0] == 8
        assert (
            int(worst[1][len(x) :].max(initial=-1) if False else worst[1][len(x) :].amax()) == -1
            or len(x) == 8
        )


def test_normal_combine_is_unweighted_and_takes_a_bias():
    bias = torch.full((3, H), 0.5).bfloat16()

    def work(group):
        buffer = normal_buffer(group)
        x, _, weights, _, handle, _ = normal_dispatch(buffer)
        plain, nothing, _ = buffer.combine(x, handle)
        with_weights, back, _ = buffer.combine(x, handle, topk_weights=weights)
        biased, _, _ = buffer.combine(torch.zeros_like(x), handle, bias=(bias, bias))
        return plain, nothing, with_weights, back, biased

    visits = torch.stack([(r == IDS // 2).any(1) for r in range(RANKS)]).sum(0)
    for plain, nothing, with_weights, back, biased in run_ranks(RANKS, work):
        assert torch.equal(plain.float(), (NX.float() * visits[:, None]).bfloat16().float())
        assert nothing is None
        assert torch.equal(with_weights, plain)
        assert torch.equal(back, WEIGHTS)
        assert bool((biased == 1.0).all())


def test_asynchronous_outputs_are_garbage_until_waited_for():
    def work(group):
        buffer = normal_buffer(group)
        x, ids, weights, _, handle, event = normal_dispatch(
            buffer, previous_event=buffer.capture(), async_finish=True, allocate_on_comm_stream=True
        )
        assert bool(x.isnan().all())
        assert bool(weights.isnan().all())
        assert int(ids.max()) < -1
        event.current_stream_wait()
        assert bool(x.isfinite().all())
        out, _, event = buffer.combine(x, handle, async_finish=True)
        assert bool(out.isnan().all())
        event.current_stream_wait()
        return out

    assert all(bool(out.isfinite().all()) for out in run_ranks(RANKS, work))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": EX.float()}, "x must be torch.bfloat16"),
        ({"x": EX[:, :8].contiguous()}, "no multiple of 32"),
        ({"topk_idx": twice(IDS)}, "experts of a token must be distinct"),
        ({"topk_idx": None}, "needs topk_idx and num_experts"),
        ({"topk_idx": torch.arange(99).view(3, 33), "topk_weights": torch.zeros(3, 33)}, "top-k = 33"),
        ({"num_experts": 2050}, "2050 experts, at most 2048"),
        ({"num_experts": 514}, "257 local experts, at most 256"),
        ({"num_max_tokens_per_rank": 2}, "x has 3 rows, num_max_tokens_per_rank is 2"),
        ({"num_max_tokens_per_rank": 4096}, "this call needs"),
        ({"previous_event": DoubleElasticBuffer.capture()}, "demands allocate_on_comm_stream"),
        ({"do_zero_padding": True, "do_expand": False}, "do_zero_padding needs do_expand"),
        ({"do_expand": False}, "the double models do_expand"),
    ],
)
def test_elastic_dispatch_refuses(changes, words):
    refused(lambda group: v2_dispatch(elastic_buffer(group), **changes), words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(1, 256).bfloat16()}, "x has 1 rows, the dispatch brought"),
        ({"x": torch.zeros(1, 128).bfloat16()}, "hidden = 128 must be a multiple of 256"),
        ({"x": torch.zeros(1, 256)}, "x must be torch.bfloat16"),
        ({"handle": None}, "handle is not what dispatch returned"),
        ({"previous_event": DoubleElasticBuffer.capture()}, "demands allocate_on_comm_stream"),
    ],
)
def test_elastic_combine_refuses(changes, words):
    def work(group):
        buffer = elastic_buffer(group)
        x, _, _, handle, _ = v2_dispatch(buffer)
        buffer.combine(**{"x": x, "handle": handle, **changes})

    refused(work, words)


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("sync", [True, False])
def test_elastic_rows_prefix_sums_and_sums(sync, several):
    alignment = 16

    def work(group):
        buffer = elastic_buffer(group, allow_multiple_reduction=several)
        stats = torch.zeros(2, dtype=torch.int32)
        x, ids, weights, handle, _ = v2_dispatch(
            buffer,
            do_cpu_sync=sync,
            expert_alignment=alignment,
            do_zero_padding=True,
            cumulative_local_expert_recv_stats=stats,
        )
        assert ids is None
        out, _, _ = buffer.combine(x.clone(), handle)
        return x, weights, handle, stats, out

    for rank, (x, weights, handle, stats, out) in enumerate(run_ranks(RANKS, work)):
        counts = [2 * int((2 * rank + e == IDS).sum()) for e in range(2)]
        starts = [0, -(-counts[0] // alignment) * alignment]
        psum = handle.psum_num_recv_tokens_per_expert.tolist()
        assert psum == [s + c for s, c in zip(starts, counts, strict=True)]
        assert handle.num_unaligned_recv_tokens_per_expert.tolist() == counts == stats.tolist()
        padded = [-(-c // alignment) * alignment for c in counts]
        assert handle.num_recv_tokens_per_expert_list == (padded if sync else [])
        worst = -(-(RANKS * M * 2 + 15 * 2) // alignment) * alignment
        assert len(x) == len(weights) == (sum(padded) if sync else worst)
        for e in range(2):
            token_N, k_N = (2 * rank + e == IDS).nonzero(as_tuple=True)
            rows = x[starts[e] : psum[e]].float()
            assert torch.allclose(rows.sum(0), 2 * EX[token_N].float().sum(0), atol=1e-3)
            got = weights[starts[e] : psum[e]].sort().values
            assert torch.equal(got, torch.cat([WEIGHTS[token_N, k_N]] * 2).sort().values)
            assert not x[psum[e] : starts[e] + padded[e]].any()
        assert torch.equal(out.float(), (EX.float() * K).bfloat16().float())


def test_constructors_refuse():
    def work(group, words, **arguments):
        with pytest.raises(ContractBreach, match=words):
            DoubleBuffer(group, **arguments)

    run_ranks(9, lambda group: work(group, "9 ranks: must be below 8"))
    run_ranks(1, lambda group: work(group, "num_rdma_bytes = 100 must be a multiple", num_rdma_bytes=100))
    run_ranks(1, lambda group: work(group, "num_qps_per_rank", low_latency_mode=True, num_qps_per_rank=0))
    with pytest.raises(ContractBreach, match="unsupported number of EP ranks: 3"):
        DoubleBuffer.get_dispatch_config(3)
    with pytest.raises(ContractBreach, match="either group or comm"):
        DoubleBuffer(None)
    with pytest.raises(ContractBreach, match="must be even"):
        DoubleBuffer.set_num_sms(21)
    refused(lambda g: DoubleElasticBuffer(g), "give num_bytes, or tokens and hidden size")
    refused(lambda g: DoubleElasticBuffer(g, num_bytes=MIB), "multiple of 2 MiB")
    refused(lambda g: elastic_buffer(g).destroy(), "explicitly_destroy must be set")
    refused(lambda g: low_latency_buffer(g).destroy(), "explicitly_destroy must be set")
    refused(lambda g: ll_dispatch(normal_buffer(g)), "built without low_latency_mode")
    refused(lambda g: normal_dispatch(low_latency_buffer(g)), "built without num_nvl_bytes")


def test_a_destroyed_buffer_refuses():
    def work(group):
        buffer = low_latency_buffer(group, explicitly_destroy=True)
        buffer.destroy()
        ll_dispatch(buffer)

    refused(work, "the buffer was destroyed")


def test_deterministic_mode_with_filled_memory_is_refused():
    deterministic: Any = torch.utils.deterministic
    before = deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    deterministic.fill_uninitialized_memory = True
    try:
        refused(lambda group: ll_dispatch(low_latency_buffer(group)), "deterministic mode")
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = before


def test_zero_copy_takes_the_next_buffer():
    def work(group):
        buffer = low_latency_buffer(group)
        recv, _, handle, _, hook = ll_dispatch(buffer)
        hook()
        target = buffer.get_next_low_latency_combine_buffer(handle)
        target.copy_(recv)
        out = torch.empty(3, LL_H, dtype=torch.bfloat16)
        got, _, hook = buffer.low_latency_combine(
            target, IDS, WEIGHTS, handle, zero_copy=True, return_recv_hook=True, out=out
        )
        hook()
        assert got is out
        return got

    for got in run_ranks(RANKS, work):
        assert torch.allclose(got.float(), X.float() * WEIGHTS.sum(1, keepdim=True), rtol=2**-8)


def silent_rank_1(group, *, shrink):
    buffer = low_latency_buffer(group, enable_shrink=shrink)
    if group.rank() == 1:
        return None
    recv, counts, handle, _, hook = ll_dispatch(buffer)
    hook()
    out, _, hook = buffer.low_latency_combine(recv, IDS, WEIGHTS, handle, return_recv_hook=True)
    hook()
    mask = torch.zeros(2, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(mask)
    return counts, out, mask.tolist()


def test_a_silent_rank_is_masked_with_shrink_and_traps_without():
    counts, out, mask = run_ranks(RANKS, lambda g: silent_rank_1(g, shrink=True), timeout=0.3)[0]
    assert mask == [0, 1]
    assert counts.tolist() == [int((e == IDS).sum()) for e in range(2)]
    kept = torch.where(IDS < 2, WEIGHTS, 0.0).sum(1, keepdim=True)
    assert torch.allclose(out.float(), X.float() * kept, rtol=2**-8)
    with pytest.raises(DeviceTrap, match="timeout for dispatch"):
        run_ranks(RANKS, lambda g: silent_rank_1(g, shrink=False), timeout=0.3)


def test_a_silent_rank_ends_normal_mode_and_version_2():
    def normal(group):
        return normal_dispatch(normal_buffer(group)) if group.rank() == 0 else None

    with pytest.raises(RuntimeError, match="CPU recv timeout"):
        run_ranks(RANKS, normal, timeout=0.3)

    def elastic(group):
        return v2_dispatch(elastic_buffer(group)) if group.rank() == 0 else None

    with pytest.raises(DeviceTrap, match="masks no ranks"):
        run_ranks(RANKS, elastic, timeout=0.3)


def test_masking_needs_shrink():
    refused(lambda g: low_latency_buffer(g).low_latency_update_mask_buffer(0, True), "enable_shrink")
