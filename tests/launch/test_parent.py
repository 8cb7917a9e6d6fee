"""What a rank does once the launcher that started it is gone, and a launcher that is told to stop early."""

import os
import signal
import threading

import pytest

from moe_runtime.launch import environment, local, rank_process, session

# No process of Linux has a larger number.
ORPHAN = {
    environment.RANK: "1",
    environment.WORLD: "2",
    environment.PORT: "1",
    environment.PARENT: str(2**22),
}


def test_a_rank_that_is_still_loading_leaves_nothing_behind(tmp_path, monkeypatch):
    """Torch takes seconds to load: the launcher's end is noticed before, and its folder removed."""
    sockets = tmp_path / "session"
    sockets.mkdir()
    killed = threading.Event()
    monkeypatch.setattr("moe_runtime.launch.parent.os.kill", lambda pid, number: killed.set())
    for name, value in {**ORPHAN, environment.SESSION: str(sockets)}.items():
        monkeypatch.setenv(name, value)

    def load(*_, parent, **__) -> int:
        assert killed.wait(10)
        return 0

    monkeypatch.setattr(rank_process, "run", load)

    async def work(*_) -> int:
        raise AssertionError("a rank does no frontend's work")

    plan, nothing = tmp_path / "plan.yaml", lambda _: None
    assert session.run(plan, [], [], check=nothing, work=work, inputs={}, outputs={}, timeline=None) == 0
    assert not sockets.exists()


@pytest.mark.parametrize("serve", [False, True])
def test_a_signal_while_ranks_are_started_ends_those_that_run(tmp_path, monkeypatch, serve):
    monkeypatch.setattr(local, "make_session", lambda: tmp_path)
    ended = []
    monkeypatch.setattr(local, "_end_all", lambda ranks: ended.append(list(ranks)))

    def start(argv, rank, *_):
        if rank == (0 if serve else 1):  # a server's first signal would go to rank 0 once there is one
            os.kill(os.getpid(), signal.SIGTERM)
        return f"rank {rank}"

    monkeypatch.setattr(local, "_start", start)
    before = signal.getsignal(signal.SIGTERM)
    assert local.launch([], 3, serve=serve) == 128 + signal.SIGTERM
    assert ended == [[] if serve else ["rank 0"]]
    assert signal.getsignal(signal.SIGTERM) is before
    assert not tmp_path.exists()
