"""The low-latency adapter between processes: a rank that dies is masked, the others go on without it."""

import multiprocessing
import os
import signal

import pytest
import torch

from moe_runtime.expert_parallel.deepep.shape import Shape
from tests.expert_parallel.deepep.deepep_ranks import batch, bound, build, dense, exchange
from tests.expert_parallel.deepep.double.library import create_group_window, open_group

SHAPE = Shape(ranks=3, slots_per_rank=3, hidden=2048, top_k=3, max_tokens=4)
ROUNDS, DIES_IN, DEADLINE = 5, 2, 60.0


def one_rank(rank, address):
    torch.set_num_threads(1)
    group = open_group(address, rank=rank, num_ranks=3, timeout=DEADLINE)
    buffer = build("low_latency", SHAPE, group, masking=True)
    seen = []
    for i in range(ROUNDS):
        if rank == 2 and i == DIES_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        b = batch(SHAPE, 4, seed=10 * i + rank)
        _, got = exchange(buffer, b, rank=rank)
        seen.append((got.float().numpy(), buffer.masked_ranks()))
    group.mailbox.close()
    return seen


def child(rank, address, results):
    results.put((rank, one_rank(rank, address)))


@pytest.mark.multiproc
def test_a_killed_rank_is_masked_and_the_others_go_on():
    context = multiprocessing.get_context("spawn")
    window, results = create_group_window(3), context.Queue()
    children = {r: context.Process(target=child, args=(r, window.address, results)) for r in (1, 2)}
    try:
        for process in children.values():
            process.start()
        outcomes = {0: one_rank(0, window.address)}
        outcomes |= [results.get(timeout=DEADLINE)]
        for process in children.values():
            process.join(DEADLINE)
    finally:
        for process in children.values():
            process.kill()
            process.join(5)
        window.close()
    assert children[2].exitcode == -signal.SIGKILL
    assert sorted(outcomes) == [0, 1]
    for rank, seen in outcomes.items():
        for i, (got, masked) in enumerate(seen):
            assert masked == ((2,) if i >= DIES_IN else ())
            b = batch(SHAPE, 4, seed=10 * i + rank)
            if i >= DIES_IN:  # the dead rank's slots answer nothing
                b.slot_ids_TK[b.slot_ids_TK >= 6] = -1
            total, size = dense(b, SHAPE, "low_latency")
            error = (torch.from_numpy(got).double() - total).abs()
            assert bool((error <= bound("low_latency", total, size, SHAPE)).all())
