"""Ranks that do not come to the launch: named while they are waited for, and at the end."""

import pytest

from moe_runtime.errors import PeerLost
from moe_runtime.launch import rendezvous
from moe_runtime.launch.environment import RankEnvironment
from moe_runtime.launch.rendezvous import Rendezvous


@pytest.mark.parametrize("here", [[0, 1], [0, 1, 2, 3]])
def test_who_is_still_loading_is_said_while_others_wait(monkeypatch, capsys, here):
    monkeypatch.setattr(rendezvous, "REPORT_EVERY", 0.02)
    meeting = Rendezvous(RankEnvironment(launcher="self", rank=0, world_size=4))
    monkeypatch.setattr(rendezvous, "START_TIMEOUT", 0.1)
    for rank in here:
        meeting.store.set(f"card/{rank}", f'"card of {rank}"')
    if len(here) == 4:
        assert meeting.gather("card", str, "loading weights") == [f"card of {rank}" for rank in here]
        assert capsys.readouterr().err == ""
        return
    with pytest.raises(PeerLost, match=r"loading weights: ranks \[2, 3\] did not arrive within"):
        meeting.gather("card", str, "loading weights")
    said = set(capsys.readouterr().err.splitlines())
    assert said == {"loading weights: waiting for ranks [2, 3]"}
