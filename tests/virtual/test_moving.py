"""Copies between devices: linear in bytes, migrations as long as their busiest rank."""

import pytest

from moe_runtime.placement.migration import plan_migration
from moe_runtime.placement.placement import linear
from moe_runtime.placement.topology import Topology
from moe_runtime.spec.catalog import DEEPSEEK_V3
from moe_runtime.spec.kv import kv_spec
from moe_runtime.virtual.cost.constants import constants
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.links import make_links
from moe_runtime.virtual.cost.loads import place, power_law
from moe_runtime.virtual.cost.moving import rebalance_seconds

KNOWN = constants()
LINKS = make_links(DEEPSEEK_V3, Setting(machine="h800", ranks=16), KNOWN.machines["h800"], KNOWN)


def test_a_prompt_of_deepseek_v3_travels_in_milliseconds():
    """61 layers of 1,152 B: 70,272 B a token; 4,096 tokens at 49.5 GB/s are 5.8 ms."""
    size = kv_spec(DEEPSEEK_V3, block_tokens=64, dtype="bfloat16").token_bytes
    assert size == 70_272
    assert LINKS.bulk(4096 * size) == pytest.approx(4096 * 70_272 / 49.5e9 + 50e-6)
    assert LINKS.bulk(4096 * size, local=True) < LINKS.bulk(4096 * size)


def test_a_migration_takes_as_long_as_its_busiest_rank():
    load_LE = power_law(2, 64, 1.0)
    before = linear(num_layers=2, num_experts=64, num_ranks=16, redundant_experts=16)
    after = place(load_LE, ranks=16, ranks_per_node=8, redundant_experts=16, balanced=True)
    topology = Topology(nodes=2, ranks_per_node=8)
    plan = plan_migration(before, after, topology, 44e6)
    seconds = rebalance_seconds(LINKS, plan, before.slots_per_rank)
    one = LINKS.bulk(44e6)
    received = [0] * 16
    for slot, link in zip(plan.slot_M.tolist(), plan.link_M.tolist(), strict=True):
        received[slot // before.slots_per_rank] += link > 0
    assert LINKS.bulk(44e6, local=True) * max(received) <= seconds <= one * len(plan)
    nothing = plan_migration(before, before, topology, 44e6)
    assert rebalance_seconds(LINKS, nothing, before.slots_per_rank) == 0.0
