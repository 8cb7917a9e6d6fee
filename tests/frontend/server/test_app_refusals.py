"""What the API refuses, and how it says so."""

import pytest

from tests.frontend.server import stub
from tests.frontend.server.client import HI, run
from tests.frontend.server.corpus import CHAT, COMPLETIONS, HOSTILE


def test_hostile_requests_are_refused_and_the_next_good_one_works(model):
    assert len(HOSTILE) >= 60

    async def story(server, http):
        for name, (path, body) in HOSTILE.items():
            answer = await http.post(path, content=body)
            assert 400 <= answer.status_code < 500, (name, answer.text)
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, name
            assert error["message"], name
            good = await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"})
            assert good.status_code == 200, name

    run(model, story)


@pytest.mark.parametrize(
    ("name", "param", "code", "status"),
    [
        ("suffix", "suffix", "unknown_parameter", 400),
        ("a typo", "max_token", "unknown_parameter", 400),
        ("top_k -1", "top_k", "invalid_value", 400),
        ("no prompt", "prompt", "missing_parameter", 400),
        ("unknown model", "model", "model_not_found", 404),
        ("max_tokens 1e9", "max_tokens", "context_length_exceeded", 400),
        ("prompt too long", "prompt", "context_length_exceeded", 400),
        ("empty prompt", "prompt", "empty_prompt", 400),
        ("an empty list of ids", "prompt", "invalid_value", 400),
        ("a picture", "messages[0].content", "invalid_value", 400),
        ("a catastrophic regex", "response_format.json_schema.schema", None, 400),
        ("10 MB", None, "body_too_large", 413),
    ],
)
def test_refusals_name_the_field(model, name, param, code, status):
    async def story(server, http):
        path, body = HOSTILE[name]
        answer = await http.post(path, content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (status, param, code)

    run(model, story)


def test_what_does_not_fit_is_refused_with_what_would(model):
    async def story(server, http):
        asked = {"model": "stub", "prompt": [5] * 550, "max_tokens": 51}
        answer = await http.post(COMPLETIONS, json=asked)
        assert answer.status_code == 400
        assert "max_tokens up to 50 would fit" in answer.json()["error"]["message"]
        server.backend.outputs = ["a " * 100]
        answer = await http.post(COMPLETIONS, json={**asked, "max_tokens": 50})
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert answer.json()["usage"]["completion_tokens"] == 50

    run(model, story)


def test_a_body_of_unknown_length_is_limited_too(model):
    async def chunks():
        for _ in range(64):
            yield b" " * 65536

    async def story(server, http):
        answer = await http.post(COMPLETIONS, content=chunks())
        assert answer.status_code == 413

    run(model, story)


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"content-encoding": "gzip"}, "content-encoding"),
        ({"connection": "upgrade", "upgrade": "h2c"}, "upgrade"),  # what some clients send at first
    ],
)
def test_a_body_that_would_not_arrive_as_it_is_is_refused_by_its_header(model, headers, param):
    async def story(server, http):
        answer = await http.post(COMPLETIONS, json={"model": "stub", "prompt": "hi"}, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert (await http.get("/v1/models", headers=headers | {"content-encoding": "Identity"})).is_success

    run(model, story)


@pytest.mark.parametrize("path", ["/health", "/", "/v1/models"])
def test_what_can_be_got_can_be_asked_for_its_head(model, path):
    async def story(server, http):
        head, get = await http.head(path), await http.get(path)
        assert head.status_code == get.status_code == 200
        assert head.headers["content-type"] == get.headers["content-type"]
        assert (await http.head(COMPLETIONS)).status_code == 405

    run(model, story)


def test_keys(model):
    async def story(server, http):
        asked = {"model": "stub", "prompt": "hi"}
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic a-key"}):
            answer = await http.post(COMPLETIONS, json=asked, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
        good = {"authorization": "Bearer a-key"}
        assert (await http.post(COMPLETIONS, json=asked, headers=good)).status_code == 200
        assert (await http.get("/admin/advice", headers=good)).status_code == 401
        assert (await http.get("/admin/advice", headers={"authorization": "Bearer root"})).status_code == 200
        for path in ("/health", "/ready", "/metrics", "/"):
            assert (await http.get(path)).status_code == 200

    run(model, story, keys=["other", "a-key"], admin_keys=["root"])


def test_admin_is_closed_without_a_key(model):
    async def story(server, http):
        assert (await http.post("/admin/drain")).status_code == 403
        assert not server.service.admission.draining

    run(model, story)


def test_a_checkpoint_without_a_template_has_no_chat(tmp_path):
    bare = stub.read_model(stub.write_checkpoint(tmp_path, template=None))

    async def story(server, http):
        answer = await http.post(CHAT, json={"model": "stub", "messages": HI})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "no_chat_template"

    run(bare, story)
