"""Reports as full as they come."""

import dataclasses

import msgspec
import pytest

from moe_runtime.report.build import build_report
from moe_runtime.report.schema import Report
from moe_runtime.report.schema_time import (
    Attribution,
    Balancing,
    RankLoads,
    Rebalance,
    Simulation,
    TimeShare,
    TimeUse,
)


@pytest.fixture(scope="session")
def measured(make) -> Report:
    """Experts moved in the middle of the run, one request failed."""
    facts, records, steps = make.run()
    failed = make.request(20, 50.0, [], finish_reason="error", error="no room", sent=None)
    moved = [dataclasses.replace(s, placement_epoch=(s.step >= 10).astype("int64")) for s in steps]
    return build_report(facts, [*records, failed], moved)


@pytest.fixture(scope="session")
def bare(make) -> Report:
    """Of a run whose ranks said nothing, and whose requests all failed but for one of a single token."""
    failed = make.request(0, 0.0, [], finish_reason="error", error="no room", sent=None)
    return build_report(make.facts(), [failed, make.request(1, 5.0, [6.0])], [])


@pytest.fixture(scope="session")
def simulated(measured) -> Report:
    """With what a simulation tells, and more ranks than a table has columns for."""
    parts = tuple(TimeShare(name=n, seconds=s, share=s / 8) for n, s in (("attention", 5.0), ("idle", 3.0)))
    use = TimeUse(instance="all", seconds=8.0, parts=parts, bounds=parts[::-1], roofline=0.4321)
    wide = tuple(tuple(0.4 + (7 * layer + 3 * rank) % 17 / 10 for rank in range(600)) for layer in range(3))

    moved = Rebalance(
        instance="decode-0",
        decided=12.25,
        action="move",
        reason="3 moves in 1 layer: 0.01 s of copies save 2 s over 256 windows",
        moves=3,
        moved_bytes=132_000_000,
        balancedness_before=0.5125,
        balancedness_after=0.8125,
        balancedness_predicted=0.875,
        outcome="dropped",
        why="not every rank was staged within 10 s",
        seconds=10.5,
    )
    balancing = Balancing(decisions=4, waits=3, late_windows=0, rebalances=(moved,))

    def change(d):
        loads = RankLoads(instance=d.instances[0], before=wide, after=wide[::-1])
        attribution = Attribution(total=use, instances=(use,))
        more = {"phases": (), "attribution": attribution, "rank_loads": loads, "balancing": balancing}
        return msgspec.structs.replace(d, **more)

    return msgspec.structs.replace(
        measured,
        simulated=True,
        simulation=Simulation(balance="recorded", weights="float8_e4m3", events=None, virtual_seconds=100.5),
        commit=None,
        machine=msgspec.structs.replace(measured.machine, cpu_model=None, cores=None),
        deployments=tuple(map(change, measured.deployments)),
    )
