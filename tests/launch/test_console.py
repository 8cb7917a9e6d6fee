"""What is said on stderr, for people and for programs."""

import json

import pytest

from moe_runtime.launch import environment
from moe_runtime.launch.console import say, write


@pytest.mark.parametrize("form", ["plain", "json"])
def test_a_message_is_one_line_where_programs_read(capsys, monkeypatch, form):
    monkeypatch.setenv(environment.LOG, form)
    say("rank 1 failed:\nTraceback\n")
    write('{"event": "request"}')
    said = capsys.readouterr().err
    if form == "plain":
        assert said == 'rank 1 failed:\nTraceback\n{"event": "request"}\n'
    else:
        first, second = map(json.loads, said.splitlines())
        assert (first["event"], first["message"]) == ("launch", "rank 1 failed:\nTraceback")
        assert second == {"event": "request"}
