"""Text that is streamed equals text that is decoded at once."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models

from moe_runtime.errors import CheckpointError
from moe_runtime.frontend.text.detokenizer import Detokenizer
from moe_runtime.frontend.text.output import TextOutput
from moe_runtime.frontend.text.vocabulary import read_vocabulary
from tests.frontend.text import tokenizers_for_tests

SNIPPETS = [
    "漢字",
    "😀🎉",
    "한국어",
    "é",
    " plain words ",
    "\n",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u2581",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("byte_level")
    return tokenizers_for_tests.byte_level(folder), read_vocabulary(folder)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    return tokenizers_for_tests.sentencepiece(folder), read_vocabulary(folder)


def streamed(vocabulary, ids) -> list[str]:
    detokenizer = Detokenizer(vocabulary)
    return [*(detokenizer.feed(i) for i in ids), detokenizer.finish()]


def output(tokenizer, seed: int) -> list[int]:
    """Random ids, most of them bytes of text, some of them cut or out of place."""
    rng = random.Random(seed)
    ids: list[int] = []
    for _ in range(rng.randrange(1, 12)):
        if rng.random() < 0.6:
            piece = tokenizer.encode(rng.choice(SNIPPETS), add_special_tokens=False).ids
            ids += piece if rng.random() < 0.7 else piece[: rng.randrange(len(piece) + 1)]
        else:
            ids += [rng.randrange(tokenizer.get_vocab_size() + 3) for _ in range(rng.randrange(4))]
    return ids


@pytest.mark.parametrize("seed", range(200))
def test_streamed_text_is_the_whole_text(byte_level, seed):
    tokenizer, vocabulary = byte_level
    ids = output(tokenizer, seed)
    pieces = streamed(vocabulary, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


def test_no_piece_shows_half_a_character(byte_level):
    tokenizer, vocabulary = byte_level
    text = "a漢😀é" * 5
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(ids) > len(text)
    assert "\ufffd" not in "".join(streamed(vocabulary, ids)[:-1])


def test_sentencepiece_text_is_the_whole_text(sentencepiece):
    """All ids but runs of bytes that are no text, which the library replaces byte by byte afterwards."""
    tokenizer, vocabulary = sentencepiece
    rng = random.Random(1)
    spelled = [tokenizer.encode(s, add_special_tokens=False).ids for s in ("漢", "😀", "é", "ab", "한")]
    plain = [tokenizer.token_to_id(p) for p in ("\u2581", "a", "\u2581b", "\u2581\u2581", "<s>")]
    for _ in range(200):
        ids = [i for _ in range(8) for i in rng.choice([*spelled, *([p] for p in plain)])]
        assert "".join(streamed(vocabulary, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_what_never_becomes_a_character_is_replaced_at_the_end(byte_level):
    tokenizer, vocabulary = byte_level
    first = tokenizer.encode("😀", add_special_tokens=False).ids[0]
    assert streamed(vocabulary, [first])[-1] == "\ufffd"


def test_special_tokens_are_silent_but_can_be_shown(byte_level):
    tokenizer, vocabulary = byte_level
    end = tokenizer.token_to_id("</s>")
    assert streamed(vocabulary, [end]) == ["", ""]
    assert vocabulary.shown(end) == b"</s>"
    assert vocabulary.shown(vocabulary.size + 5) == b""


def test_other_decoders_are_refused(tmp_path):
    tokenizer = Tokenizer(models.WordPiece({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="WordPiece"):
        read_vocabulary(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["{", '{"model": 3}', '{"model": ' + "[" * 10_000, '{"model": {"vocab": {"a": 4294967295}}}', None],
)
def test_a_damaged_file_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        read_vocabulary(tmp_path)


def letters(vocabulary, *pieces: str) -> list[list[int]]:
    """Ids of one-byte tokens that spell each piece."""
    ids = {b: i for i, b in enumerate(vocabulary.text_bytes) if len(b) == 1}
    return [[ids[b.to_bytes()] for b in p.encode()] for p in pieces]


def streamed_with_stop(vocabulary, pieces, stop, min_tokens=0) -> list[str]:
    """The text of each piece, then of the end."""
    out = TextOutput(vocabulary, stop, min_tokens)
    texts = []
    for ids in letters(vocabulary, *pieces):
        texts.append("".join("" if out.stopped else out.feed(i) for i in ids))
    return [*texts, out.finish()]


def test_a_stop_string_over_several_tokens_streams_nothing(byte_level):
    assert streamed_with_stop(byte_level[1], ["DEF", "G", "HI", "J"], ["DEFGHIJ"]) == ["", "", "", "", ""]


def test_a_near_miss_streams_all(byte_level):
    texts = streamed_with_stop(byte_level[1], ["DEF", "G", "HI", "X"], ["DEFGHIJ"])
    assert texts == ["", "", "", "DEFGHIX", ""]
    assert streamed_with_stop(byte_level[1], ["DEF", "GHI"], ["DEFGHIJ"])[-1] == "DEFGHI"


def test_a_stop_string_that_the_end_completes(byte_level):
    """The replacement character of a begun one is text like any other."""
    tokenizer, vocabulary = byte_level
    first = tokenizer.encode("😀", add_special_tokens=False).ids[0]
    out = TextOutput(vocabulary, ["\ufffd"])
    assert out.feed(first) == ""
    assert out.finish() == ""
    assert out.stopped


def test_min_tokens_come_before_stop_strings(byte_level):
    assert "".join(streamed_with_stop(byte_level[1], ["aaaab"], ["a"], min_tokens=3)) == "aaa"
