"""The stub's model, read once."""

import pytest

from moe_runtime.frontend.server.prepare import ServedModel
from tests.frontend.server import stub


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> ServedModel:
    return stub.read_model(stub.write_checkpoint(tmp_path_factory.mktemp("stub")))
