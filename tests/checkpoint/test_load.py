"""Loading a rank's share: right values in every slot, every byte read once, nothing left unassigned."""

import dataclasses
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from moe_runtime.checkpoint import load as load_module
from moe_runtime.checkpoint import shapes
from moe_runtime.checkpoint.load import load_rank
from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.errors import CheckpointError
from moe_runtime.models.families import registry
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.spec.model import serve_shared_in_slots

FAMILIES = ("deepseek_v3", "qwen3_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def path(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("load") / request.param
    make_checkpoint(path, family=request.param, size="tiny")
    return path


@pytest.fixture
def opened(path):
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


def stored_tensors(path):
    return {k: v for file in path.glob("*.safetensors") for k, v in load_file(file).items()}


def parameter_shapes(targets):
    """Shape of each parameter in `spec.weights`, without the axis of the slots."""
    found: dict[str, tuple[int, ...]] = {}
    for t in targets:
        rows, *others = t.used_shape
        before = found.get(t.parameter, (0,))[0]
        found[t.parameter] = (max(before, t.row_start + rows), *others)
    return found


def allocate(targets, slots_per_rank, dtype=torch.float32):
    """Parameters of the shapes in `spec.weights`, filled with a value that a test can tell from weights."""
    fp32 = {t.parameter for t in targets if t.fp32}
    in_slots = {t.parameter for t in targets if t.moe_layer is not None}
    return {
        name: torch.full(
            (slots_per_rank, *shape) if name in in_slots else shape,
            777.0,
            dtype=torch.float32 if name in fp32 else dtype,
        )
        for name, shape in parameter_shapes(targets).items()
    }


def assert_loaded(stored, targets, parameters, local_experts):
    """Every row of every parameter against the checkpoint as safetensors' own reader sees it."""
    for t in targets:
        whole = parameters[t.parameter]
        rows = slice(t.row_start, t.row_start + t.shape[0])
        if t.moe_layer is None:
            places = [whole[rows]]
        else:
            places = [whole[s, rows] for s in np.flatnonzero(local_experts(t.moe_layer) == t.expert)]
        for place in places:
            assert torch.equal(place, stored[t.source].to(place.dtype)), t.source
    for t in targets:
        if t.moe_layer is not None:
            for slot in np.flatnonzero(local_experts(t.moe_layer) == -1):
                assert torch.equal(
                    parameters[t.parameter][slot], torch.zeros_like(parameters[t.parameter][slot])
                )


@pytest.mark.parametrize("redundant", [0, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_reads_its_share_once(path, monkeypatch, ranks, redundant):
    spec = registry.read_spec(path)
    targets, stored = registry.tensor_targets(spec), stored_tensors(path)
    placement = linear(
        num_layers=spec.num_moe_layers, num_experts=32, num_ranks=ranks, redundant_experts=redundant
    )
    reads = []
    preadv = os.preadv

    def counted(fd, buffers, offset):
        count = preadv(fd, buffers, offset)
        reads.append((fd, offset, count))
        return count

    monkeypatch.setattr("moe_runtime.checkpoint.safetensors_file.os.preadv", counted)
    for rank in range(ranks):
        with Checkpoint.open(path) as checkpoint:
            metadata = sum(n for *_, n in reads)
            reads.clear()
            parameters = allocate(targets, placement.slots_per_rank)
            experts = lambda layer, rank=rank: placement.local_experts(layer, rank)  # noqa: E731
            report = load_rank(checkpoint, targets, parameters, experts)
            read = sum(n for *_, n in reads)
            needed = sum(
                stored[t.source].nbytes
                for t in targets
                if t.expert is None or t.expert in experts(t.moe_layer)
            )
            assert (report.bytes_read, report.bytes_needed) == (read, needed)
            assert read <= 1.05 * needed
            assert len({(fd, offset) for fd, offset, _ in reads}) == len(reads)
            index = (path / "model.safetensors.index.json").stat().st_size
            assert checkpoint.metadata_bytes == metadata + index
            assert checkpoint.bytes_read == metadata + index + read
            per_slot = 3 * spec.hidden * spec.moe.intermediate * 4
            assert report.expert_bytes_resident == placement.slots_per_rank * per_slot * spec.num_moe_layers
            assert report.seconds > 0
            reads.clear()
        assert_loaded(stored, targets, parameters, experts)


def test_reading_ends_when_the_weights_are_no_longer_wanted(path, opened):
    targets, before = registry.tensor_targets(registry.read_spec(path)), opened.bytes_read
    answers = iter([True, True, False])
    experts = lambda layer: np.arange(32, dtype=np.int32)  # noqa: E731
    with pytest.raises(CheckpointError, match="no longer wanted"):
        load_rank(opened, targets, allocate(targets, 32), experts, lambda: next(answers))
    read = sum(opened.entries[t.source].nbytes for t in targets[:2])
    assert opened.bytes_read == before + read


def test_an_expert_in_two_slots_is_read_once(path, opened):
    spec = registry.read_spec(path)
    targets = registry.tensor_targets(spec)
    row = np.array([*range(32), 7, 7, -1, 31], np.int32)
    placement = Placement(
        slot_to_expert_LS=np.tile(row, (spec.num_moe_layers, 1)), num_experts=32, num_ranks=1
    )
    parameters = allocate(targets, 36)
    report = load_rank(opened, targets, parameters, lambda layer: placement.local_experts(layer, 0))
    assert report.bytes_read == report.bytes_needed == sum(e.nbytes for e in opened.entries.values())
    assert_loaded(stored_tensors(path), targets, parameters, lambda layer: row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_stored_shared_experts_go_to_slots_and_no_more_is_read(tmp_path, monkeypatch, dtype):
    """The hub stores shared experts as one MLP: expert E + j is a block of its rows, or of its columns."""
    plain = shapes.config
    monkeypatch.setattr(shapes, "config", lambda *a: {**plain(*a), "n_shared_experts": 3})
    make_checkpoint(tmp_path / "c", family="deepseek_v3", size="tiny")
    spec = serve_shared_in_slots(registry.read_spec(tmp_path / "c"))
    targets, stored = registry.tensor_targets(spec), stored_tensors(tmp_path / "c")
    row = np.array([33, 4, -1, 34, 33], np.int32)
    inter, hidden = spec.moe.intermediate, spec.hidden
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        checkpoint.validate(targets, lambda name: False)
        parameters = allocate(targets, 5, dtype)
        report = load_rank(checkpoint, targets, parameters, lambda layer: row)
    assert report.bytes_read == report.bytes_needed
    replicated = sum(stored[t.source].nbytes for t in targets if t.expert is None)
    assert report.bytes_needed == replicated + 3 * (3 * inter * hidden * 4) * spec.num_moe_layers
    for layer in spec.moe_layers:
        source = f"model.layers.{layer}.mlp.shared_experts"
        gate, up, down = (stored[f"{source}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gate_up = parameters[f"layers.{layer}.moe.experts.gate_up"]
        for slot, part in ((0, 1), (3, 2), (4, 1)):
            block = slice(part * inter, (part + 1) * inter)
            assert torch.equal(gate_up[slot], torch.cat([gate[block], up[block]]).to(dtype))
            assert torch.equal(parameters[f"layers.{layer}.moe.experts.down"][slot], down[:, block].to(dtype))
        assert not gate_up[2].any()


@pytest.mark.parametrize("stored_as", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_dtypes_are_converted_in_bounded_pieces(tmp_path, monkeypatch, stored_as, wanted):
    make_checkpoint(tmp_path / "c", family="deepseek_v3", size="tiny", dtype=stored_as)
    monkeypatch.setattr(load_module, "SCRATCH_BYTES", 1000)  # 7 rows of 32 float32, so tensors come in pieces
    seen = []
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        targets = registry.tensor_targets(registry.read_spec(tmp_path / "c"))
        parameters = allocate(targets, 32, getattr(torch, wanted))
        read_into = checkpoint.read_into

        def noted(entry, buffer, start=0):
            seen.append(len(buffer))
            read_into(entry, buffer, start)

        monkeypatch.setattr(checkpoint, "read_into", noted)
        report = load_rank(checkpoint, targets, parameters, lambda layer: np.arange(32, dtype=np.int32))
    assert report.bytes_read == report.bytes_needed
    if stored_as != wanted:
        assert max(seen) <= 1000
    stored = stored_tensors(tmp_path / "c")
    assert_loaded(stored, targets, parameters, lambda layer: np.arange(32))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert parameters["layers.1.moe.router.correction_bias"].dtype == torch.float32
    assert torch.equal(parameters["layers.1.moe.router.correction_bias"], stored[bias])


def test_module_parameters_may_require_gradients(path, opened):
    targets = registry.tensor_targets(registry.read_spec(path))
    parameters = {k: torch.nn.Parameter(v) for k, v in allocate(targets, 32).items()}
    load_rank(opened, targets, parameters, lambda layer: np.arange(32, dtype=np.int32))
    assert_loaded(stored_tensors(path), targets, parameters, lambda layer: np.arange(32))


def load_all(checkpoint, targets, change=lambda parameters: None):
    parameters = allocate(targets, 32)
    change(parameters)
    load_rank(checkpoint, targets, parameters, lambda layer: np.arange(32, dtype=np.int32))


def test_a_row_assigned_twice_is_an_error(path, opened):
    targets = registry.tensor_targets(registry.read_spec(path))
    with pytest.raises(
        CheckpointError, match=r"model\.norm\.weight: rows 0:32 .*norm\.weight are assigned twice"
    ):
        load_all(opened, [*targets, next(t for t in targets if t.source == "model.norm.weight")])
    up = next(t for t in targets if t.source.endswith("experts.5.up_proj.weight"))
    shifted = [dataclasses.replace(t, row_start=t.row_start - 1) if t is up else t for t in targets]
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj\.weight: rows 15:31 .* assigned twice"):
        load_all(opened, shifted)


def test_a_row_never_assigned_is_an_error(path, opened):
    targets = registry.tensor_targets(registry.read_spec(path))
    up = next(t for t in targets if t.source.endswith("experts.5.up_proj.weight"))
    with pytest.raises(
        CheckpointError, match=r"parameter .*experts\.gate_up .*row \[5, 16\] was never assigned"
    ):
        load_all(opened, [t for t in targets if t is not up])
    with pytest.raises(CheckpointError, match=r"parameter surplus .*row \[0\] was never assigned"):
        load_all(opened, targets, lambda p: p.update(surplus=torch.zeros(3)))


def test_a_tensor_that_does_not_fit_is_an_error(path, opened):
    targets = registry.tensor_targets(registry.read_spec(path))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: \[32\] does not fit rows 0:32"):
        load_all(opened, targets, lambda p: p.update({"norm.weight": torch.zeros(31)}))
    with pytest.raises(CheckpointError, match=r"the model has no parameter norm\.weight"):
        load_all(opened, targets, lambda p: p.pop("norm.weight"))


def test_values_too_large_for_the_parameter_are_named(tmp_path):
    make_checkpoint(tmp_path / "c", family="qwen3_moe", size="tiny")
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        targets = registry.tensor_targets(registry.read_spec(tmp_path / "c"))
        entry = checkpoint.entries[name]
        with entry.file.open("r+b") as file:
            file.seek(entry.offset)
            file.write(np.float32(1e30).tobytes())
        load_all(checkpoint, targets)  # fits float32, whatever the sums of it do
        parameters = allocate(targets, 32, torch.float16)
        with pytest.raises(
            CheckpointError, match=rf"{name}: 1 of its values are NaN or infinite in torch.float16"
        ):
            load_rank(checkpoint, targets, parameters, lambda layer: np.arange(32, dtype=np.int32))


def test_huge_but_finite_values_pass(tmp_path):
    make_checkpoint(tmp_path / "c", family="qwen3_moe", size="tiny")
    with Checkpoint.open(tmp_path / "c") as checkpoint:
        targets = registry.tensor_targets(registry.read_spec(tmp_path / "c"))
        entry = checkpoint.entries["model.embed_tokens.weight"]
        with entry.file.open("r+b") as file:
            file.seek(entry.offset)
            file.write(np.full(8, 3e38, np.float32).tobytes())  # their sum overflows float32
        load_all(checkpoint, targets)
