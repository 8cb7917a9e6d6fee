"""Adapter and double against the published signatures, so that one misreading cannot hide in both.

`signatures.json` is parsed from the sgl-deep-ep wheel by scripts/deepep_signatures.py; its package is
never imported. `EARLIER_LACKS`: arguments of the V1 constructor that tag v1.2.1 does not have.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import util
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.errors import UnavailableError, UserError
from moe_runtime.expert_parallel.deepep.library import Library, accepted, call, load_library
from moe_runtime.expert_parallel.deepep.shape import Shape
from tests.expert_parallel.deepep.deepep_ranks import batch, build, exchange, run_ranks
from tests.expert_parallel.deepep.double.buffer import DoubleBuffer
from tests.expert_parallel.deepep.double.elastic import DoubleElasticBuffer
from tests.expert_parallel.deepep.double.events import DoubleEvent
from tests.script import load_script

HERE = Path(__file__).parent
SCRIPT = HERE.parents[2] / "scripts" / "deepep_signatures.py"
PUBLISHED = json.loads((HERE / "signatures.json").read_text())["classes"]
DOUBLES = {"Buffer": DoubleBuffer, "ElasticBuffer": DoubleElasticBuffer, "EventOverlap": DoubleEvent}
EARLIER_LACKS = {"use_fabric", "enable_shrink"}


def signature(arguments: list[dict[str, str]], without: set[str] | None = None) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                a["name"],
                getattr(inspect.Parameter, a["kind"].upper()),
                default=a.get("default", inspect.Parameter.empty),
            )
            for a in arguments
            if a["name"] not in (without or set())
        ]
    )


class Recorder:
    """Subclasses of the double that note (class, method, positional count, keywords) of every call."""

    def __init__(self) -> None:
        self.calls: set[tuple[str, str, int, tuple[str, ...]]] = set()

    def library(self) -> Library:
        return Library(
            version="recorded",
            buffer=self._recorded("Buffer"),
            elastic_buffer=self._recorded("ElasticBuffer"),
            topk_idx_dtype=torch.int64,
        )

    def _recorded(self, name: str) -> type:
        base = DOUBLES[name]
        members = {
            method: self._wrap(name, method, inspect.getattr_static(base, method))
            for method in PUBLISHED[name]
            if hasattr(base, method)
        }
        return type(f"Recorded{name}", (base,), members)

    def _wrap(self, name: str, method: str, member: Any) -> Any:
        static = isinstance(member, staticmethod)
        function: Callable[..., object] = member.__func__ if static else member

        @wraps(function)
        def noted(*args: object, **kwargs: object) -> object:
            self.calls.add((name, method, len(args) - (not static), tuple(sorted(kwargs))))
            return function(*args, **kwargs)

        return staticmethod(noted) if static else noted


def record(mode: str, **more: object) -> set[tuple[str, str, int, tuple[str, ...]]]:
    hidden = {"normal": 128, "low_latency": 2048, "elastic": 256}[mode]
    shape = Shape(ranks=2, slots_per_rank=2, hidden=hidden, top_k=2, max_tokens=4)
    recorder = Recorder()
    library = recorder.library()

    def work(group):
        buffer = build(mode, shape, group, library=library, **more)
        exchange(buffer, batch(shape, 3, seed=group.rank()), rank=group.rank())
        if mode == "low_latency":
            buffer.clean()
            buffer.mask(1 - group.rank())
            buffer.unmask(1 - group.rank())
            assert buffer.masked_ranks() == ()
        buffer.close()

    run_ranks(2, work)
    return recorder.calls


CALLS = {
    "normal": """__init__ get_dispatch_config get_combine_config capture get_dispatch_layout dispatch combine
        destroy""",
    "low_latency": """__init__ get_low_latency_rdma_size_hint low_latency_dispatch low_latency_combine
        clean_low_latency_buffer low_latency_update_mask_buffer low_latency_query_mask_buffer destroy""",
    "elastic": "__init__ capture dispatch combine destroy",
}


@pytest.mark.parametrize(
    ("mode", "more"), [("normal", {}), ("low_latency", {"masking": True}), ("elastic", {"alignment": 16})]
)
def test_every_call_of_an_adapter_binds_to_the_published_signature(mode, more):
    calls = record(mode, **more)
    assert {method for _, method, _, _ in calls} >= set(CALLS[mode].split())
    for name, method, positional, keywords in calls:
        published = signature(PUBLISHED[name][method])
        published.bind(*[None] * positional, **dict.fromkeys(keywords))
        assert positional == 0 or method in ("get_dispatch_config", "get_combine_config"), method


@pytest.mark.parametrize("name", DOUBLES)
def test_the_double_has_the_published_arguments(name):
    """Same names in the same order with the same defaults; wheels may have more of them."""
    shared = 0
    for method, arguments in PUBLISHED[name].items():
        member = inspect.getattr_static(DOUBLES[name], method, None)
        if member is None or name == "EventOverlap" and method == "__init__":
            continue
        function = member.__func__ if isinstance(member, staticmethod) else member
        own = list(inspect.signature(function).parameters.values())
        own = own if isinstance(member, staticmethod) else own[1:]
        published = {a["name"]: a for a in arguments}
        for parameter in own:
            default = published[parameter.name].get("default", inspect.Parameter.empty)
            given = parameter.default
            assert (repr(given) if given is not inspect.Parameter.empty else given) == default, (
                method,
                parameter,
            )
        order = [a["name"] for a in arguments]
        assert [p.name for p in own] == [n for n in order if n in {p.name for p in own}]
        shared += 1
    assert shared >= {"Buffer": 15, "ElasticBuffer": 5, "EventOverlap": 1}[name]


def test_arguments_that_ask_for_nothing_are_left_out_for_versions_without_them():
    def constructor(**kwargs: object) -> dict[str, object]:
        return kwargs

    arguments = PUBLISHED["Buffer"]["__init__"]
    vars(constructor)["__signature__"] = signature(arguments, without=EARLIER_LACKS)
    assert call(constructor, group=None, enable_shrink=False) == {"group": None}
    with pytest.raises(UserError, match="cannot do enable_shrink"):
        call(constructor, group=None, enable_shrink=True)
    assert accepted(constructor, {"num_nvl_bytes": 0}) == {"num_nvl_bytes": 0}


def test_a_buffer_without_masking_works_on_an_earlier_version():
    """The low-latency adapter, on a class whose constructor has no `enable_shrink`."""

    class Earlier(DoubleBuffer):
        def __init__(
            self,
            group,
            num_nvl_bytes=0,
            num_rdma_bytes=0,
            low_latency_mode=False,
            num_qps_per_rank=24,
            allow_nvlink_for_low_latency_mode=True,
            allow_mnnvl=False,
            explicitly_destroy=False,
        ):
            super().__init__(
                group,
                num_rdma_bytes=num_rdma_bytes,
                low_latency_mode=low_latency_mode,
                num_qps_per_rank=num_qps_per_rank,
                explicitly_destroy=explicitly_destroy,
            )

    shape = Shape(ranks=2, slots_per_rank=2, hidden=2048, top_k=2, max_tokens=4)
    library = Library(version="1.2.1", buffer=Earlier, elastic_buffer=None, topk_idx_dtype=torch.int64)

    def work(group):
        buffer = build("low_latency", shape, group, library=library)
        return exchange(buffer, batch(shape, 3, seed=1), rank=group.rank())[1]

    assert all(bool(got.isfinite().all()) for got in run_ranks(2, work))
    with pytest.raises(UserError, match="cannot do enable_shrink"):
        run_ranks(2, lambda group: build("low_latency", shape, group, library=library, masking=True))
    small = Shape(ranks=2, slots_per_rank=2, hidden=256, top_k=2, max_tokens=4)
    with pytest.raises(UnavailableError, match="ElasticBuffer"):
        run_ranks(2, lambda group: build("elastic", small, group, library=library))


def test_a_missing_package_is_named_with_the_line_that_installs_it():
    if util.find_spec("deep_ep") is not None:
        pytest.skip("deep_ep is installed here")
    with pytest.raises(UnavailableError, match=r"pip install 'moe-runtime\[deepep\]'"):
        load_library()


@pytest.fixture
def package(tmp_path, monkeypatch) -> Iterator[Path]:
    """The source of a package of that name, which nobody has imported, and nobody has afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("deep_ep", None)
    yield tmp_path / "deep_ep.py"
    sys.modules.pop("deep_ep", None)


def test_a_package_that_breaks_on_import_says_why(package):
    package.write_text("import libcudart_of_another_machine\n")
    with pytest.raises(UserError, match="installed but cannot be imported.*libcudart_of_another_machine"):
        load_library()


def test_an_installed_package_is_taken_as_it_is(package):
    package.write_text("import torch\n__version__ = '1.2.1'\ntopk_idx_t = torch.int32\nclass Buffer: pass\n")
    library = load_library()
    assert library.version == "1.2.1"
    assert library.topk_idx_dtype == torch.int32
    assert library.buffer.__name__ == "Buffer"
    assert library.elastic_buffer is None


def test_the_script_reads_positions_kinds_and_defaults():
    module = load_script("scripts/deepep_signatures.py")
    source = (
        "class A:\n"
        "  def f(self, a, /, b=1, *, c: int = None): ...\n"
        "  @staticmethod\n"
        "  def g(x=-1): ...\n"
        "  def _h(self): ...\n"
    )
    assert module.class_signatures(source, "A") == {
        "f": [
            {"name": "a", "kind": "positional_only"},
            {"name": "b", "kind": "positional_or_keyword", "default": "1"},
            {"name": "c", "kind": "keyword_only", "default": "None"},
        ],
        "g": [{"name": "x", "kind": "positional_or_keyword", "default": "-1"}],
    }
