"""Structured output through the real grammar compiler, on a real tokenizer."""

import json

import numpy as np
import pytest

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.engine.structures import MAX_WHITESPACE, Structures
from moe_runtime.errors import RequestRefused
from moe_runtime.spec.requests import Structure

EOS = 1
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["anna", "bob"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Path and vocabulary size of a checkpoint."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_checkpoint(path, family="deepseek_v3", size="tiny")
    return path, json.loads((path / "config.json").read_text())["vocab_size"]


@pytest.fixture
def structures(tiny):
    path, vocab_size = tiny
    found = Structures(path, vocab_size, (EOS,))
    yield found
    found.close()


def generate(constraint, vocab_size, *, seed, limit=400):
    """Random allowed tokens until the end of the sequence is chosen."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < limit:
        bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")[:vocab_size]
        allowed = np.flatnonzero(bits)
        assert len(allowed), "a constraint always leaves a way on"
        token = EOS if EOS in allowed else int(rng.choice(allowed))
        constraint.accept(token)
        if token == EOS:
            return tokens
        tokens.append(token)
    return tokens


def test_whatever_is_chosen_is_the_schema(tiny, structures):
    tokenizer = Tokenizer(tiny[0])
    ended = 0
    for seed in range(6):
        structure = Structure(kind="json_schema", schema=json.dumps(SCHEMA))
        tokens = generate(structures.start(structure).result(60), tiny[1], seed=seed)
        text = tokenizer.decode(tokens)
        if len(tokens) == 400:  # digits without end: legal so far
            continue
        value = json.loads(text)
        assert value["name"] in ("anna", "bob")
        assert isinstance(value["age"], int)
        ended += 1
    assert ended >= 3


def test_free_json_starts_like_json(tiny, structures):
    bits = np.unpackbits(
        structures.start(Structure(kind="json")).result(60).mask().view(np.uint8), bitorder="little"
    )
    allowed = [Tokenizer(tiny[0]).decode([t]) for t in np.flatnonzero(bits[: tiny[1]]).tolist()]
    assert any(a.startswith("{") for a in allowed)
    assert not any(a.startswith("}") for a in allowed)
    assert not bits[EOS]


def test_blanks_come_to_an_end(tiny, structures):
    tokenizer = Tokenizer(tiny[0])
    constraint = structures.start(Structure(kind="json")).result(60)
    [brace], [blank] = tokenizer.encode("{"), tokenizer.encode(" ")
    constraint.accept(brace)
    for _ in range(MAX_WHITESPACE):
        constraint.accept(blank)
    bits = np.unpackbits(constraint.mask().view(np.uint8), bitorder="little")
    assert not bits[blank]


def test_after_the_end_everything_is_allowed(tiny, structures):
    constraint = structures.start(Structure(kind="json_schema", schema='{"const": 1}')).result(60)
    tokens = generate(constraint, tiny[1], seed=0)
    assert Tokenizer(tiny[0]).decode(tokens) == "1"
    constraint.accept(5)
    assert (constraint.mask() == -1).all()


@pytest.mark.parametrize("schema", ['{"type": "nonsense"}', "{", '{"$ref": "#/definitions/none"}'])
def test_schemas_that_cannot_be_compiled_are_refused(structures, schema):
    with pytest.raises(RequestRefused, match="response_format"):
        structures.start(Structure(kind="json_schema", schema=schema)).result(60)
