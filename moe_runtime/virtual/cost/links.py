"""Links: seconds of dispatch, combine, all-reduce and bulk copies, from libraries' published tables.

Owns what travels over which link. Times follow the slowest of: what the busiest rank sends, what the busiest
rank receives, over RDMA and over the scale-up links. Knows nothing of kernels or of what computes meanwhile.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from moe_runtime.errors import InputError
from moe_runtime.spec.bytes import wire_row_bytes
from moe_runtime.spec.limits import DispatchMode
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cost.constants import Constants, Library, Machine
from moe_runtime.virtual.cost.deployment import Setting

NODE = 8  # ranks of a node in the published measurements
FITTED_RANKS = 32  # of the published rows in normal mode


class Spread(NamedTuple):
    """How unevenly rows arrive, each the largest over the mean, 1 if even.

    rows    (token, expert) rows a rank gets: what its experts compute
    ranks   tokens that reach a rank at least once
    nodes   tokens that reach a node at least once
    """

    rows: float = 1.0
    ranks: float = 1.0
    nodes: float = 1.0


EVEN = Spread()
# (direction, busiest, mean, spread, rounds) -> seconds
Timing = Callable[[int, float, float, Spread, int], float]


@dataclass(frozen=True, slots=True)
class Links:
    """Transfers of one instance; build with `make_links`.

    normal_start  seconds of any normal-mode transfer before its bytes
    beside        time of a normal-mode transfer's bytes beside computation over that without
    """

    _low_latency: Timing
    _normal: Timing
    _all_reduce: Callable[[float], float]
    _bulk: Callable[[float, bool], float]
    normal_start: float = 0.0
    beside: float = 1.0

    def transfer(
        self,
        mode: DispatchMode,
        direction: int,
        busiest: float,
        mean: float,
        spread: Spread = EVEN,
        rounds: int = 1,
    ) -> float:
        """Seconds of one dispatch (direction 0) or combine (1) of one micro-batch.

        busiest, mean  tokens of the rank with most tokens, and of the mean rank
        rounds         in which they are sent, each with its own start
        """
        call = self._low_latency if mode == "low_latency" else self._normal
        return call(direction, busiest, mean, spread, rounds)

    def all_reduce(self, num_bytes: float) -> float:
        """Seconds of one all-reduce of `num_bytes` within the attention group."""
        return self._all_reduce(num_bytes)

    def bulk(self, num_bytes: float, *, local: bool = False) -> float:
        """Seconds of a copy between devices, of one node (`local`) or two, alone on its links."""
        return self._bulk(num_bytes, local)


def make_links(model: ModelSpec, setting: Setting, machine: Machine, constants: Constants) -> Links:
    """The links of an instance. InputError where ranks cannot reach each other."""
    hardware = machine.hardware
    one_domain = setting.ranks <= hardware.scaleup_world
    if not one_domain and hardware.rdma_bandwidth is None:
        raise InputError(
            f"{hardware.name}: {setting.ranks} ranks are more than its scale-up domain of"
            f" {hardware.scaleup_world}, and its datasheet row names no RDMA"
        )
    name = setting.library or machine.library
    if name not in constants.libraries:
        raise InputError(f"library {name!r}: one of {', '.join(constants.libraries)}")
    library = constants.libraries[name]
    rows = (
        wire_row_bytes(model.hidden, setting.precision.dispatch),
        wire_row_bytes(model.hidden, setting.precision.combine),
    )
    reduce, bulk = _all_reduce(setting, machine, constants), _bulk(machine, constants)
    if setting.ranks == 1 or setting.experts == "tensor_parallel":
        return Links(_nothing, _nothing, reduce, bulk)
    if one_domain and hardware.scaleup_world > NODE:
        one_sided = _one_sided(model, setting, machine, constants, rows)
        return Links(one_sided, one_sided, reduce, bulk)
    low = _low_latency(model, setting, machine, library, rows)
    start = normal_start(constants.fitted.normal_start, library, setting.ranks)
    normal = _normal(model, setting, machine, library, rows, start)
    return Links(low, normal, reduce, bulk, start, constants.fitted.normal_transfers)


def _nothing(direction: int, busiest: float, mean: float, spread: Spread, rounds: int) -> float:
    return 0.0


def _low_latency(
    model: ModelSpec, setting: Setting, machine: Machine, library: Library, rows: tuple[int, int]
) -> Timing:
    """A row per (token, expert), all of them over the slowest link their destination needs."""
    table, k = library.low_latency, model.moe.slots_per_token
    away = _away(setting) if table.scaleup_used else 1.0
    alone = setting.ranks <= machine.hardware.scaleup_world and table.scaleup_used
    share = table.scaleup_measured_share if alone else 1.0
    line = (machine.hardware.scaleup_bandwidth * share) if alone else _rdma(machine)
    starts = _starts(library, setting.ranks)
    per_token = tuple(k * size * (1.0 if alone else away) / line for size in rows)

    def seconds(direction: int, busiest: float, mean: float, spread: Spread, rounds: int) -> float:
        return starts[direction] * rounds + per_token[direction] * max(busiest, mean * spread.rows)

    return seconds


def _starts(library: Library, ranks: int) -> tuple[float, float]:
    """What the published low-latency dispatch and combine take beyond their bytes at the line rate."""
    table = library.low_latency
    starts = []
    for curve, dtype in ((table.dispatch, "float8_e4m3"), (table.combine, "bfloat16")):
        size = table.tokens * table.top_k * wire_row_bytes(table.hidden, dtype)
        rest = []
        for measured, taken in curve:
            inside = table.scaleup_used and measured <= NODE
            rate = table.scaleup * table.scaleup_measured_share if inside else table.rdma
            part = 1.0 if inside or not table.scaleup_used else 1 - NODE / measured
            rest.append((measured, max(0.0, taken - size * part / rate)))
        starts.append(interpolate(rest, ranks))
    return starts[0], starts[1]


def normal_start(fitted: float, library: Library, ranks: int) -> float:
    """Start of a normal-mode transfer among `ranks`, fitted among 32.

    It waits for all of them, as low-latency transfers do: it is taken to grow with their number as those do.
    """
    return fitted * sum(_starts(library, ranks)) / sum(_starts(library, FITTED_RANKS))


def _normal(
    model: ModelSpec,
    setting: Setting,
    machine: Machine,
    library: Library,
    rows: tuple[int, int],
    start: float,
) -> Timing:
    """A row per distinct node over RDMA, from there one per distinct rank over the scale-up links."""
    table, nodes = library.normal, setting.nodes
    line = machine.hardware.scaleup_bandwidth
    near = [distinct_ranks(model, setting) * rows[d] / min(table.scaleup[d], line) for d in (0, 1)]
    far = [0.0, 0.0]
    if nodes > 1:
        reached = distinct_nodes(model, setting) * (1 - 1 / nodes)
        far = [reached * rows[d] / _rdma(machine) for d in (0, 1)]
    p = table.pipelining

    def seconds(direction: int, busiest: float, mean: float, spread: Spread, rounds: int) -> float:
        rdma = far[direction] * max(busiest, mean * spread.nodes)
        scaleup = near[direction] * max(busiest, mean * spread.ranks)
        return start * rounds + float((rdma**p + scaleup**p) ** (1 / p))

    return seconds


def _one_sided(
    model: ModelSpec, setting: Setting, machine: Machine, constants: Constants, rows: tuple[int, int]
) -> Timing:
    """A row per distinct rank, all ranks in one scale-up domain."""
    table = constants.one_sided
    starts = [interpolate(curve, setting.ranks) for curve in (table.dispatch, table.combine)]
    line = machine.hardware.scaleup_bandwidth * table.share
    per_token = [distinct_ranks(model, setting) * size / line for size in rows]

    def seconds(direction: int, busiest: float, mean: float, spread: Spread, rounds: int) -> float:
        return starts[direction] * rounds + per_token[direction] * max(busiest, mean * spread.ranks)

    return seconds


def _all_reduce(setting: Setting, machine: Machine, constants: Constants) -> Callable[[float], float]:
    """Ring over the scale-up links; over several nodes each rank then reduces its shard over RDMA."""
    group, c, hardware = setting.tensor_parallel, constants.collective, machine.hardware
    if group == 1:
        return lambda num_bytes: 0.0
    world = min(group, hardware.scaleup_world)
    nodes = -(-group // world)
    start = c.node_start + (c.network_start if nodes > 1 else 0.0)
    per_byte = 2 * (world - 1) / world / (hardware.scaleup_bandwidth * c.scaleup_share)
    if nodes > 1:
        per_byte += 2 * (nodes - 1) / nodes / world / _rdma(machine)
    return lambda num_bytes: start + per_byte * num_bytes


def bulk_rates(machine: Machine, constants: Constants) -> tuple[float, float]:
    """Bytes/s of a copy between devices of one node, and of two (over RDMA where there is)."""
    c, hardware = constants.collective, machine.hardware
    near = hardware.scaleup_bandwidth * c.scaleup_share
    return near, near if hardware.rdma_bandwidth is None else hardware.rdma_bandwidth * c.bulk_share


def _bulk(machine: Machine, constants: Constants) -> Callable[[float, bool], float]:
    start, (near, far) = constants.collective.bulk_start, bulk_rates(machine, constants)
    return lambda num_bytes, local: start + num_bytes / (near if local else far)


def distinct_nodes(model: ModelSpec, setting: Setting) -> float:
    """Mean number of nodes a token's experts lie on.

    With group-limited routing and whole groups on nodes: j of a node's g groups are kept with hypergeometric
    probability, and given j of G kept groups it gets none of the K experts with probability (1 - j / G)^K.
    """
    router, nodes = model.moe.router, setting.nodes
    groups, kept, k = router.num_groups, router.kept_groups, router.top_k
    if groups == 1 or groups % nodes or not setting.groups_stay:
        return nodes * (1 - (1 - 1 / nodes) ** k)
    mine = groups // nodes
    total = math.comb(groups, kept)
    hit = sum(
        math.comb(mine, j) * math.comb(groups - mine, kept - j) / total * (1 - (1 - j / kept) ** k)
        for j in range(1, min(mine, kept) + 1)
    )
    return nodes * hit


def distinct_ranks(model: ModelSpec, setting: Setting) -> float:
    """Mean number of ranks a token's experts lie on; kept groups narrow the choice of ranks."""
    router = model.moe.router
    choice = setting.ranks
    if router.num_groups > 1 and setting.groups_stay and router.num_groups % setting.nodes == 0:
        choice = max(1, setting.ranks * router.kept_groups // router.num_groups)
    return choice * (1 - (1 - 1 / choice) ** router.top_k)


def interpolate(curve: list[tuple[int, float]] | tuple[tuple[int, float], ...], ranks: int) -> float:
    """Linear in log2 of the EP degree, constant beyond the ends of the table."""
    if ranks <= curve[0][0]:
        return curve[0][1]
    for (a, low), (b, high) in zip(curve, curve[1:], strict=False):
        if ranks <= b:
            return low + (high - low) * math.log2(ranks / a) / math.log2(b / a)
    return curve[-1][1]


def _away(setting: Setting) -> float:
    """Share of rows whose destination is on another node."""
    return 1 - min(setting.ranks_per_node, setting.ranks) / setting.ranks


def _rdma(machine: Machine) -> float:
    rate = machine.hardware.rdma_bandwidth
    if rate is None:
        raise InputError(f"{machine.hardware.name}: its datasheet row names no RDMA")
    return rate
