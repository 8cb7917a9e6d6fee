"""Kernels and links against the tables that their constants were taken from."""

import math

import numpy as np
import pytest
import yaml

from moe_runtime.spec.catalog import DEEPSEEK_V3
from moe_runtime.virtual.cost.constants import constants
from moe_runtime.virtual.cost.deployment import Precision, Setting
from moe_runtime.virtual.cost.links import distinct_nodes, distinct_ranks, make_links
from moe_runtime.virtual.cost.published import FOLDER
from moe_runtime.virtual.cost.rows import LayerKernels
from moe_runtime.virtual.cost.work import Rates

KNOWN = constants()
H800 = Rates(hardware=KNOWN.machines["h800"].hardware, kernels=KNOWN.kernels, fitted=KNOWN.fitted)
FP8 = "float8_e4m3"


def links(library: str, ranks: int, machine: str = "h800", **more):
    setting = Setting(machine=machine, ranks=ranks, library=library, **more)
    return make_links(DEEPSEEK_V3, setting, KNOWN.machines[machine], KNOWN)


def test_products_reach_the_published_rates():
    data = yaml.safe_load((FOLDER / "deepgemm.yaml").read_text())
    errors = []
    for m, n, k, rate in data["dense"]:
        errors.append(math.log(2e-12 * m * n * k / H800.gemm(m, n, k, FP8).seconds / rate))
    for groups, m, n, k, rate in data["grouped"]:
        # All rows are real: the half tile that the model adds to a group is taken off.
        work = H800.grouped_gemm(groups * m, groups, n, k, FP8, tile=0)
        errors.append(math.log(2e-12 * groups * m * n * k / work.seconds / rate))
    assert len(errors) == 28
    assert np.sqrt(np.mean(np.square(errors))) < 0.09
    assert max(map(abs, errors)) < 0.27


@pytest.mark.parametrize("library", ["deepep-2025-02", "deepep-v1"])
def test_low_latency_times_are_the_published_ones(library):
    table = KNOWN.libraries[library].low_latency
    for direction, curve in ((0, table.dispatch), (1, table.combine)):
        for ranks, seconds in curve:
            if ranks == 8 and library == "deepep-v1":
                continue  # inside a node: bytes at 160 GB/s, the start is the rest, checked below
            taken = links(library, ranks).transfer("low_latency", direction, 128, 128)
            assert taken == pytest.approx(seconds, rel=0.002)
    inside = links("deepep-v1", 8)
    assert inside.transfer("low_latency", 0, 128, 128) == pytest.approx(77e-6, rel=0.002)
    assert inside.transfer("low_latency", 1, 128, 128) == pytest.approx(114e-6, rel=0.002)


@pytest.mark.parametrize("library", ["deepep-2025-02", "deepep-v1"])
def test_normal_rates_are_the_published_ones_within_ten_percent(library):
    """DeepEP's test: 4096 tokens, one group per node, 4 kept."""
    table = KNOWN.libraries[library].normal
    for ranks, *rates in table.measured:
        nodes = ranks // 8
        router = DEEPSEEK_V3.moe.router
        reached = 4 * (1 - math.comb(192, 8) / math.comb(256, 8)) if nodes > 2 else 2.0
        near_ranks = min(ranks, 32)
        copies = near_ranks * (1 - (1 - 1 / near_ranks) ** router.top_k)
        for direction, row in ((0, 7392), (1, 14336)):
            rdma = reached * (1 - 1 / nodes) * 4096 * row / 50e9
            scaleup = copies * 4096 * row / table.scaleup[direction]
            seconds = (rdma**table.pipelining + scaleup**table.pipelining) ** (1 / table.pipelining)
            assert reached * 4096 * row / seconds == pytest.approx(rates[direction], rel=0.1)


def test_one_domain_times_are_the_published_ones_within_a_third():
    """TensorRT-LLM's table of one-sided all-to-all: BF16 rows out and back, no groups."""
    published = {  # tokens -> EP degree -> us out, back
        1: {8: (18.9, 31.0), 16: (18.8, 30.8), 32: (19.8, 31.4), 64: (27.8, 32.6)},
        128: {8: (31.7, 38.1), 16: (34.6, 39.9), 32: (37.8, 41.1), 64: (41.6, 44.5)},
        512: {8: (89.5, 91.7), 16: (97.1, 98.2), 32: (109.6, 102.5), 64: (115.7, 106.7)},
        2048: {8: (311.8, 322.6), 16: (343.3, 348.4), 32: (373.7, 369.5), 64: (399.2, 372.1)},
    }
    for ranks in (8, 16, 32, 64):
        setting = Setting(
            machine="gb200-nvl72",
            ranks=ranks,
            ranks_per_node=4,
            groups_stay=False,
            precision=Precision(dispatch="bfloat16"),
        )
        all_to_all = make_links(DEEPSEEK_V3, setting, KNOWN.machines["gb200-nvl72"], KNOWN)
        for tokens, row in published.items():
            for direction in (0, 1):
                taken = all_to_all.transfer("low_latency", direction, tokens, tokens)
                assert taken * 1e6 == pytest.approx(row[ranks][direction], rel=0.34)


def test_the_decode_core_is_what_the_breakdowns_say():
    """H800, 4,096 tokens of context, 256 rows: .501 ms; H100, 2,050: .281 ms."""
    kernels = LayerKernels(model=DEEPSEEK_V3, precision=Precision(), rates=H800)
    assert kernels.decode_core(256 * 4096.0, 1).seconds == pytest.approx(0.501e-3, rel=0.15)
    assert kernels.decode_core(256 * 2050.0, 1).seconds == pytest.approx(0.281e-3, rel=0.15)


def test_the_prefill_core_is_what_the_breakdown_says():
    """16,384 tokens of 4K prompts: 4.57 ms with all multiprocessors, 5.6 beside transfers."""
    kernels = LayerKernels(model=DEEPSEEK_V3, precision=Precision(), rates=H800)
    pairs = 16384 * 4097 / 2
    assert kernels.prefill_core(pairs, 16384.0).seconds == pytest.approx(4.57e-3, rel=0.03)
    beside = LayerKernels(model=DEEPSEEK_V3, precision=Precision(), rates=H800.with_available(108 / 132))
    assert beside.prefill_core(pairs, 16384.0).seconds == pytest.approx(5.6e-3, rel=0.03)


def test_nodes_and_ranks_a_token_reaches_are_those_of_drawn_tokens():
    rng = np.random.default_rng(0)
    setting = Setting(machine="h800", ranks=32)
    nodes, ranks = [], []
    for _ in range(4000):
        kept = rng.choice(8, 4, replace=False)
        chosen = rng.choice(np.concatenate([np.arange(g * 32, g * 32 + 32) for g in kept]), 8, replace=False)
        nodes.append(len(set(chosen // 64)))
        ranks.append(len(set(chosen // 8)))
    assert distinct_nodes(DEEPSEEK_V3, setting) == pytest.approx(np.mean(nodes), rel=0.02)
    assert distinct_ranks(DEEPSEEK_V3, setting) == pytest.approx(np.mean(ranks), rel=0.03)


def test_latent_projections_read_their_weights_once():
    """A decode row of DeepSeek-V3: 16.8 million weights of kv_b in bf16 bound the small batch."""
    kernels = LayerKernels(model=DEEPSEEK_V3, precision=Precision(), rates=H800)
    floor = 2 * 512 * 128 * 256 / (3.35e12 * KNOWN.kernels.memory_share)
    assert floor < kernels.absorb(1.0).memory < 1.1 * floor
