"""The balancer's published call, `rebalance_experts`, torch in and torch out.

Owns the conversion from and to torch and a faithful reproduction of the published algorithm
(deepseek-ai/EPLB), which the tests and benchmarks compare with. By default the call answers with our
own solver; `reference=True` runs the published algorithm. torch is imported inside the function only.

L layers, E experts, P replicas (= slots), D GPUs (= ranks), G groups, N nodes.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from moe_runtime.eplb.errors import BalanceError
from moe_runtime.eplb.loads import check_load
from moe_runtime.eplb.solve import solve
from moe_runtime.placement.topology import Topology

if TYPE_CHECKING:
    from torch import Tensor


def rebalance_experts(
    weight: "Tensor",
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    reference: bool = False,
) -> "tuple[Tensor, Tensor, Tensor]":
    """Which expert sits in which slot, for loads `weight` [L, E], when replicas share load equally.

    Returns, all int64 on the CPU: `phy2log` [L, P], the expert of each slot; `log2phy` [L, E, X], the
    slots of each expert, -1 padded, X the largest number of replicas; `logcnt` [L, E], replicas of
    each expert. Every slot is filled. With `reference` the published algorithm answers, else `solve`,
    which never puts an expert twice on a GPU that it need not.

    Raises BalanceError for sizes that do not divide or loads that are negative or not finite.
    """
    import torch

    load_LE = weight.detach().to("cpu", torch.float64).numpy()
    _check(load_LE, num_replicas, num_groups, num_nodes, num_gpus)
    if reference:
        experts_LP, replica_LP = published(
            load_LE.astype(np.float32), num_replicas, num_groups, num_nodes, num_gpus
        )
    else:
        topology = Topology(nodes=num_nodes, ranks_per_node=num_gpus // num_nodes)
        solution = solve(load_LE, topology, num_replicas, groups=num_groups, split="equal", fill=True)
        experts_LP = solution.placement.slot_to_expert_LS.astype(np.int64)
        replica_LP = _replica_numbers(experts_LP)
    L, E = load_LE.shape
    counts_LE = np.stack([np.bincount(row, minlength=E) for row in experts_LP]).reshape(L, E)
    slots_LEX = np.full((L, E, int(counts_LE.max(initial=1))), -1, np.int64)
    slots_LEX[np.arange(L)[:, None], experts_LP, replica_LP] = np.arange(num_replicas)
    return torch.from_numpy(experts_LP), torch.from_numpy(slots_LEX), torch.from_numpy(counts_LE)


def published(
    load_LE: NDArray[np.float32], num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The published algorithm in float32: expert and replica number of each slot, both [L, P].

    Hierarchical where the groups divide over the nodes, else global (one group, one node). Ties are
    broken by index throughout, as the published code does with a stable sort.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    L, E = load_LE.shape
    G, N, D, P = num_groups, num_nodes, num_gpus, num_replicas
    group_size = E // G
    layer = np.arange(L)[:, None]
    # 1. Groups to nodes. `ordered` lists the experts node by node.
    node_LG, place_LG = pack(load_LE.reshape(L, G, group_size).sum(-1), N)
    first_LG = (node_LG * (G // N) + place_LG) * group_size
    to_ordered_LE = (first_LG[..., None] + np.arange(group_size)).reshape(L, E)
    ordered_LE = np.empty_like(to_ordered_LE)
    ordered_LE[layer, to_ordered_LE] = np.arange(E)
    # 2. Replicas inside each node; rows are now (layer, node).
    node_load = load_LE[layer, ordered_LE].reshape(L * N, E // N)
    expert, replica, count = replicate(node_load, P // N)
    # 3. Replicas to the node's GPUs.
    row = np.arange(L * N)[:, None]
    gpu, place = pack((node_load / count.astype(np.float32))[row, expert], D // N)
    slot = gpu * (P // D) + place
    in_slot = np.empty_like(slot)
    in_slot[row, slot] = np.arange(P // N)
    expert_of_slot = expert[row, in_slot].reshape(L, N, P // N) + (np.arange(N) * (E // N))[None, :, None]
    return ordered_LE[layer, expert_of_slot.reshape(L, P)], replica[row, in_slot].reshape(L, P)


def pack(weight_Ln: NDArray[np.float32], num_packs: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """n weights into packs of exactly n / num_packs: heaviest first, each to the lightest pack not full.

    Returns the pack and the place in the pack of each weight, both int64 [L, n].
    """
    L, n = weight_Ln.shape
    room = n // num_packs
    if room == 1:
        return np.tile(np.arange(n), (L, 1)), np.zeros((L, n), np.int64)
    pack_Ln, place_Ln = np.zeros((L, n), np.int64), np.zeros((L, n), np.int64)
    for layer, order in enumerate(np.argsort(-weight_Ln, axis=1, kind="stable")):
        load, taken = [np.float32(0)] * num_packs, [0] * num_packs
        for item in order.tolist():
            lightest = min((p for p in range(num_packs) if taken[p] < room), key=load.__getitem__)
            pack_Ln[layer, item], place_Ln[layer, item] = lightest, taken[lightest]
            load[lightest] = np.float32(load[lightest] + weight_Ln[layer, item])
            taken[lightest] += 1
    return pack_Ln, place_Ln


def replicate(
    weight_Ln: NDArray[np.float32], total: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """total - n times: one more replica to the item whose replicas weigh most.

    Returns item and replica number of each of the `total` replicas [L, total], replicas per item [L, n].
    """
    L, n = weight_Ln.shape
    item = np.tile(np.arange(total), (L, 1))
    replica = np.zeros((L, total), np.int64)
    count = np.ones((L, n), np.int64)
    layer = np.arange(L)
    for i in range(n, total):
        heaviest = np.argmax(weight_Ln / count.astype(np.float32), axis=1)
        item[:, i], replica[:, i] = heaviest, count[layer, heaviest]
        count[layer, heaviest] += 1
    return item, replica, count


def _replica_numbers(experts_LP: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many earlier slots of the layer hold the same expert."""
    order = np.argsort(experts_LP, axis=1, kind="stable")
    layer = np.arange(len(experts_LP))[:, None]
    ordered = experts_LP[layer, order]
    position = np.arange(experts_LP.shape[1])
    first = np.where(np.diff(ordered, axis=1, prepend=-1) != 0, position, 0)
    out = np.empty_like(experts_LP)
    out[layer, order] = position - np.maximum.accumulate(first, axis=1)
    return out


def _check(load_LE: NDArray[np.float64], P: int, G: int, N: int, D: int) -> None:
    E = check_load(load_LE).shape[1]
    for small, big, what in (
        (G, E, "num_groups must divide the experts"),
        (N, D, "num_nodes must divide num_gpus"),
        (D, P, "num_gpus must divide num_replicas"),
    ):
        if small < 1 or big % small:
            raise BalanceError(f"{what}: {small} does not divide {big}")
    if P < E:
        raise BalanceError(f"num_replicas = {P} is fewer than the {E} experts")
