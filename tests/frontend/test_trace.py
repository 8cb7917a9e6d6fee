"""Traces: the format, its complaints, scaling, and the prompts made of them."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_runtime.errors import InputError
from moe_runtime.frontend.prompts import trace_prompts, usable_ids
from moe_runtime.frontend.trace import read_trace

ROOT = Path(__file__).resolve().parents[2]
REAL_TRACE = ROOT.parent / "shared" / "data" / "traces" / "mooncake_conversation_trace.jsonl"
IDS = usable_ids(512, [0, 1, 2])


@pytest.fixture
def trace(tmp_path):
    """Writes objects (or raw lines) as a trace; returns its path."""

    def write(*lines):
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
        return path

    return write


def request(timestamp=0, input_length=10, output_length=5, **more):
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, **more}


def codes(text):
    return [ord(c) for c in text]


def prompts_of(path, *, max_tokens=10**6, encode=codes, **options):
    requests = read_trace(path, **options)
    return trace_prompts(requests, ids=IDS, encode=encode, max_tokens=max_tokens)


def test_arrivals_start_at_zero_in_seconds(trace):
    requests = read_trace(trace(request(5000), request(5250.5), request(7000)))
    assert [r.arrival for r in requests] == [0.0, 0.2505, 2.0]
    assert [(r.index, r.input_length, r.output_length) for r in requests] == [
        (0, 10, 5),
        (1, 10, 5),
        (2, 10, 5),
    ]


def test_unsorted_traces_are_sorted_and_ties_keep_their_order(trace):
    path = trace(request(300), request(100), request(200), request(100), "", request(100))
    requests = read_trace(path)
    assert [r.index for r in requests] == [1, 3, 4, 2, 0]
    assert [r.arrival for r in requests] == pytest.approx([0, 0, 0, 0.1, 0.2])
    assert requests[2].where == f"{path}:6", "blank lines count as lines"


def test_limit_takes_the_first_to_arrive_and_speed_divides(trace):
    requests = read_trace(trace(request(3000), request(1000), request(2000)), limit=2, speed=4)
    assert [(r.index, r.arrival) for r in requests] == [(1, 0.0), (2, 0.25)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (request(timestamp="0"), "timestamp: must be a number, not a string"),
        (request(timestamp=True), "timestamp: must be a number, not a boolean"),
        ({"input_length": 3, "output_length": 1}, "timestamp: is missing"),
        (request(input_length=1.5), "input_length: must be an integer, not 1.5"),
        (request(input_length=0), "input_length: is 0, must be 1 or more"),
        (request(output_length=-4), "output_length: is -4, must be 1 or more"),
        (request(output_length=None), "output_length: must be an integer, not null"),
        (request(hash_ids=7), "hash_ids: must be a list of integers, not 7"),
        (request(hash_ids=["a"]), r"hash_ids\[0\]: must be an integer, not a string"),
        (request(hash_ids=[-1]), r"hash_ids\[0\]: is -1, must be 0 or more"),
        (request(hash_ids=[2**63]), r"hash_ids\[0\]: is too large"),
        (request(hash_ids=[1, 2]), "hash_ids: has 2 ids, but input_length 10 is 1 blocks"),
        (request(input_length=513, hash_ids=[1]), "hash_ids: has 1 ids, but input_length 513 is 2 blocks"),
        (request(prompt=""), "prompt: is empty"),
        (request(prompt=["a"]), "prompt: must be a string, not a list"),
        (request(hashids=[1]), "hashids: unknown field; did you mean hash_ids?"),
        ("{", "not JSON"),
        ("[1]", "must be a JSON object, not a list"),
        ('{"timestamp": NaN}', "not JSON"),
        ('{"timestamp": 1e999, "output_length": 1, "input_length": 1}', "timestamp|not JSON"),
    ],
)
def test_complaints_name_file_line_and_field(trace, line, message):
    path = trace(request(), request(), line)
    with pytest.raises(InputError, match=message) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{path}:3: ")


def test_bytes_that_are_not_text_are_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'{"timestamp": 0, "output_length": 1, "prompt": "\xff\xfe"}\n')
    with pytest.raises(InputError, match="trace.jsonl:1: not JSON"):
        read_trace(path)


def test_files_without_requests_are_refused(trace, tmp_path):
    with pytest.raises(InputError, match="has no lines"):
        read_trace(trace("", " "))
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")


def test_fields_of_other_tools_are_let_through(trace):
    assert read_trace(trace(request(session="x", turn=3)))[0].input_length == 10


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"limit": 0}, "--limit"),
        ({"speed": 0}, "--speed"),
        ({"speed": float("inf")}, "--speed"),
        ({"scale_lengths": -1}, "--scale-lengths"),
        ({"scale_lengths": float("nan")}, "--scale-lengths"),
    ],
)
def test_impossible_options_are_named(trace, options, name):
    with pytest.raises(InputError, match=name):
        read_trace(trace(request()), **options)


def test_a_speed_at_which_the_trace_never_ends_is_refused(trace):
    path = trace(request(0), request(5))
    with pytest.raises(InputError, match="--speed is 1e-300: the last request would arrive"):
        read_trace(path, speed=1e-300)
    assert len(read_trace(path, speed=1e-300, limit=1)) == 1


def test_scaled_lengths_keep_at_least_one_token(trace):
    r = read_trace(trace(request(input_length=100, output_length=3)), scale_lengths=0.1)[0]
    assert (r.input_length, r.output_length) == (10, 1)
    assert r.block_tokens == pytest.approx(51.2)


def test_prompts_use_only_usable_ids_and_are_the_same_every_time(trace):
    path = trace(request(input_length=5000), request(input_length=5000), request(input_length=3))
    first, second, short = prompts_of(path)
    assert prompts_of(path) == [first, second, short]
    assert min(first) >= 3
    assert max(first) <= 511
    counts = np.bincount(first, minlength=512)[3:]
    assert counts.max() < 30, "5000 draws over 509 ids are spread"
    assert np.mean(np.equal(first, second)) < 0.02
    assert short != first[:3]
    # Pinned: a prompt must not change with the version of a library.
    assert prompts_of(trace(request(input_length=4, hash_ids=[7])))[0] == [310, 312, 489, 243]


def shared_prefix(a, b):
    n = min(len(a), len(b))
    differs = np.flatnonzero(np.not_equal(a[:n], b[:n]))
    return int(differs[0]) if len(differs) else n


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.25, 0.1, 0.037])
def test_equal_hash_ids_share_their_tokens_at_every_scale(trace, scale):
    path = trace(
        request(input_length=1536, hash_ids=[1, 2, 3]),
        request(input_length=1700, hash_ids=[1, 2, 9, 4]),
        request(input_length=600, hash_ids=[1, 2]),
        request(input_length=1536, hash_ids=[8, 2, 3]),
    )
    a, b, c, d = prompts_of(path, scale_lengths=scale)
    boundary = int(np.ceil(2 * 512 * scale))
    assert boundary <= shared_prefix(a, b) <= boundary + 2, "two draws may agree by chance"
    assert shared_prefix(a, c) == len(c)
    assert shared_prefix(a, d) <= 2
    first = int(np.ceil(512 * scale))
    assert a[first:] == d[first:], "blocks 2 and 3 are the same blocks"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(length=st.integers(1, 5000), scale=st.floats(0.001, 2))
def test_any_scale_gives_the_scaled_length(trace, length, scale):
    ids = list(range(-(-length // 512)))
    path = trace(request(input_length=length, hash_ids=ids))
    (prompt,) = prompts_of(path, scale_lengths=scale)
    assert len(prompt) == max(1, round(length * scale))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 900)), min_size=1, max_size=8),
    limit=st.integers(8, 2000),
)
def test_too_long_requests_are_refused_with_a_scale_that_works(trace, lengths, limit):
    path = trace(*(request(input_length=i, output_length=o) for i, o in lengths))
    worst = max(i + o for i, o in lengths)
    if worst <= limit:
        prompts_of(path, max_tokens=limit)
        return
    with pytest.raises(
        InputError, match=rf"trace.jsonl:\d+: input_length: .* are {worst}, a sequence"
    ) as raised:
        prompts_of(path, max_tokens=limit)
    scale = float(str(raised.value).split("--scale-lengths ")[1].split()[0])
    assert 0.3 * limit / worst < scale < 1
    prompts_of(path, max_tokens=limit, scale_lengths=scale)


def test_text_prompts_are_encoded_not_scaled(trace):
    path = trace({"timestamp": 0, "output_length": 2, "prompt": "abc"}, request())
    text, drawn = prompts_of(path, encode=codes)
    assert text == [97, 98, 99]
    assert len(drawn) == 10
    with pytest.raises(InputError, match="trace.jsonl:1: prompt: a text cannot be scaled"):
        read_trace(path, scale_lengths=0.5)
    with pytest.raises(InputError, match="trace.jsonl:1: prompt: has no tokens"):
        prompts_of(path, encode=lambda _: [])
    with pytest.raises(InputError, match="are 5, a sequence holds 4"):
        prompts_of(trace({"timestamp": 0, "output_length": 2, "prompt": "abc"}), max_tokens=4)


def test_special_ids_are_never_drawn():
    assert usable_ids(10, [0, 9, 4, 99]).tolist() == [1, 2, 3, 5, 6, 7, 8]
    with pytest.raises(InputError, match="no two ids"):
        usable_ids(3, [0, 1])


def test_demo_trace_is_what_its_script_writes():
    made = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make_trace.py")], capture_output=True, text=True, check=True
    )
    path = ROOT / "configs" / "demo_trace.jsonl"
    assert made.stdout == path.read_text()
    requests = read_trace(path)
    assert len(requests) == 48
    assert 10 < requests[-1].arrival < 15
    assert {32 <= r.input_length <= 400 and 8 <= r.output_length <= 48 for r in requests} == {True}
    prompts = prompts_of(path)
    starts = [tuple(p[:32]) for p in prompts]
    assert 0 < len(starts) - len(set(starts)) < 20, "some prompts begin alike, most do not"


def test_script_writes_requests_of_one_length(tmp_path):
    sizes = ["--requests=90", "--seconds=9", "--input-length=1200", "--output-length=300"]
    script = [sys.executable, str(ROOT / "scripts" / "make_trace.py")]
    made = subprocess.run([*script, *sizes], capture_output=True, text=True, check=True)
    path = tmp_path / "trace.jsonl"
    path.write_text(made.stdout)
    requests = read_trace(path)
    assert [(r.input_length, r.output_length) for r in requests] == [(1200, 300)] * 90
    assert 6 < requests[-1].arrival < 12
    half = subprocess.run([*script, "--input-length=1200"], capture_output=True, text=True, check=False)
    assert half.returncode == 2
    assert "go together" in half.stderr


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the published trace is not at hand")
def test_published_trace_is_read_whole():
    requests = read_trace(REAL_TRACE, scale_lengths=1 / 64)
    assert len(requests) == 12031
    prompts = trace_prompts(requests[:200], ids=IDS, encode=codes, max_tokens=10**5)
    assert [len(p) for p in prompts] == [r.input_length for r in requests[:200]]
    assert prompts[0][:8] == prompts[1][:8], "the first block is a common one"
