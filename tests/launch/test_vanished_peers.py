"""Ranks that end after they have published what others open: whoever opens it names them."""

import socket

import pytest
import torch

from moe_runtime.errors import PeerLost
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.expert_parallel.shm import ShmBuffer, ShmSizes
from moe_runtime.expert_parallel.where import StepAndLayer
from moe_runtime.launch.agreement import Agreement, AgreementAddress
from moe_runtime.launch.balancing import open_staging
from moe_runtime.launch.buffers import connect_buffer
from moe_runtime.launch.place import Place, place_of
from moe_runtime.shared_memory import Window, WindowAddress
from tests.plan.plans import UNIFIED, effective

GONE = WindowAddress(2**22, 3, 4096)  # no process of Linux has a larger number


def place(folder, rank: int, *, nodes: int) -> Place:
    """Of four ranks."""
    overrides = ("deployments.unified.expert_parallel=4", f"cluster.ranks_per_node={4 // nodes}")
    return place_of(effective(folder, UNIFIED, f"cluster.nodes={nodes}", *overrides), rank)


def refused_port() -> tuple[str, int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        return host, port


def test_the_agreement_window(tmp_path):
    agreement = Agreement(place(tmp_path, 1, nodes=1), 1.0)
    with pytest.raises(PeerLost, match="rank 0 is gone: its agreement window"):
        agreement.connect([AgreementAddress(window=GONE)])
    leaders = [AgreementAddress(window=GONE, tree=refused_port())] * 2
    with pytest.raises(PeerLost, match="rank 2 is gone: its agreement window"):
        Agreement(place(tmp_path, 3, nodes=2), 1.0).connect(leaders)


def test_the_tree_of_leaders(tmp_path):
    agreement = Agreement(place(tmp_path, 2, nodes=2), 1.0)
    own = agreement.open()
    assert own is not None
    leaders = [AgreementAddress(window=GONE, tree=refused_port()), own]
    with pytest.raises(PeerLost, match="waiting for rank 0, connecting the agreement tree"):
        agreement.connect(leaders)


def test_the_dispatch_window(tmp_path):
    sizes = ShmSizes(
        num_ranks=4,
        slots_per_rank=1,
        hidden=8,
        top_k=1,
        max_tokens=4,
        payload=Payload("float32"),
        output_dtype=torch.float32,
    )
    buffer = ShmBuffer(sizes, rank=3, timeout=1.0)
    with pytest.raises(PeerLost, match="rank 2 is gone: its dispatch window"):
        connect_buffer(buffer, place(tmp_path, 3, nodes=2), GONE, StepAndLayer())


def test_staging_windows():
    mine = Window.create("staging", 4096)
    with pytest.raises(PeerLost, match="rank 1 is gone: its staging window"):
        open_staging([mine.address, GONE], num_slots=2, slot_bytes=8)
    mine.close()
