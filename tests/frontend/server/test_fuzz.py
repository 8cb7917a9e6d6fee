"""Requests made up from the server's own OpenAPI description never meet an error of the server."""

import hypothesis
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from tests.frontend.server import stub

KEY = {"authorization": "Bearer root"}


@pytest.fixture(scope="module")
def operations(model):
    server = stub.make_server(model, admin_keys=["root"], timeout=5.0)
    schema = schemathesis.openapi.from_asgi("/openapi.json", server.app)
    schema.config.generation.modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
    found = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    # After /admin/drain there is nothing left to try.
    return [o for o in found if o.path != "/admin/drain"]


def fuzz(operations, cases: int) -> None:
    seen: dict[str, set[int]] = {}
    bodies = [o for o in operations if o.body]
    assert {o.path for o in bodies} == {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"}
    for operation in operations:
        share = cases // len(bodies) if operation.body else 5
        statuses = seen.setdefault(operation.path, set())

        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(
            max_examples=share,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def one(case):
            answer = case.call(headers=KEY)
            statuses.add(answer.status_code)  # noqa: B023 - called before the next turn
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}

        one()
    for path in ("/v1/completions", "/v1/chat/completions"):
        assert seen[path] >= {200, 400}, seen


def test_200_cases(operations):
    fuzz(operations, 200)


@pytest.mark.soak
def test_2000_cases(operations):
    fuzz(operations, 2000)
