"""Damaged checkpoints: each is one CheckpointError that names the file and the tensor or field."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_runtime.checkpoint.load import load_rank
from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.errors import CheckpointError
from moe_runtime.models.families import registry

FIRST, LAST = "model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors"
INDEX = "model.safetensors.index.json"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
GATE = "model.layers.1.mlp.gate.weight"


@pytest.fixture
def path(tmp_path):
    make_checkpoint(tmp_path / "c", family="deepseek_v3", size="tiny")
    return tmp_path / "c"


def check(path):
    """What the parent process does before it starts ranks."""
    spec = registry.read_spec(path)
    with Checkpoint.open(path) as checkpoint:
        checkpoint.validate(registry.tensor_targets(spec), lambda name: registry.skipped_tensor(spec, name))
    Tokenizer(path)


# -- ways to damage a checkpoint ---------------------------------------------------------------------------


def shard_of(path, tensor):
    return path / json.loads((path / INDEX).read_text())["weight_map"][tensor]


def edit_json(file, change):
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def edit_tensors(path, tensor, change, *, index=True):
    """Rewrite the shard of `tensor` after `change(tensors)`; the index follows unless told not to."""
    file = shard_of(path, tensor)
    tensors = load_file(file)
    before = set(tensors)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    if index:
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        kept = {k: v for k, v in weight_map.items() if k not in before} | dict.fromkeys(tensors, file.name)
        edit_json(path / INDEX, lambda data: data.update(weight_map=kept))


def edit_header(file, change):
    """Change the JSON header of a shard and leave its data as they are."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = change(json.loads(raw[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def moved(tensor, begin, end):
    """A header change that shifts the data offsets of one tensor."""

    def change(header):
        offsets = header[tensor]["data_offsets"]
        header[tensor]["data_offsets"] = [offsets[0] + begin, offsets[1] + end]
        return header

    return change


def truncate(file, *, keep):
    raw = file.read_bytes()
    file.write_bytes(raw[: keep(len(raw))])


def set_value(tensor, value):
    return lambda tensors: tensors[tensor].view(-1).__setitem__(5, value)


def entry(tensors, name, value):
    tensors[name] = value


def damage_missing_shard(path):
    (path / LAST).unlink()


def damage_truncated_data(path):
    truncate(path / LAST, keep=lambda size: size - 100)


def damage_truncated_header(path):
    truncate(path / FIRST, keep=lambda size: 50)


def damage_empty_file(path):
    (path / FIRST).write_bytes(b"")


def damage_trailing_bytes(path):
    with (path / FIRST).open("ab") as file:
        file.write(bytes(12))


def damage_wrong_dtype(path):
    edit_tensors(path, GATE, lambda t: entry(t, GATE, t[GATE].to(torch.int64)))


def damage_fp8(path):
    edit_tensors(path, GATE, lambda t: entry(t, GATE, t[GATE].to(torch.float8_e4m3fn)))


def damage_wrong_shape(path):
    edit_tensors(path, GATE, lambda t: entry(t, GATE, t[GATE].T.contiguous()[:31]))


def damage_nan_bias(path):
    edit_tensors(path, BIAS, set_value(BIAS, torch.nan))


def damage_infinite_bf16_bias(path):
    def change(tensors):
        tensors[BIAS] = tensors[BIAS].to(torch.bfloat16)
        tensors[BIAS][3] = -torch.inf

    edit_tensors(path, BIAS, change)


def damage_missing_tensor(path):
    edit_tensors(path, GATE, lambda t: t.pop(GATE))


def damage_missing_expert(path):
    for name in ("gate_proj", "up_proj", "down_proj"):
        tensor = f"model.layers.2.mlp.experts.31.{name}.weight"
        edit_tensors(path, tensor, lambda t, tensor=tensor: t.pop(tensor))


def damage_extra_tensor(path):
    edit_tensors(path, GATE, lambda t: entry(t, "model.layers.1.mlp.gate.bias", torch.zeros(32)))


def damage_duplicate_tensor(path):
    edit_tensors(path, GATE, lambda t: entry(t, "model.norm.weight", torch.ones(32)), index=False)


def damage_duplicate_in_header(path):
    edit_header(
        path / FIRST,
        lambda h: json.dumps(h).encode().replace(b'"model.norm.weight"', b'"model.embed_tokens.weight"'),
    )


def damage_broken_header(path):
    edit_header(path / FIRST, lambda h: json.dumps(h).encode()[:-20] + b"}" * 20)


def damage_header_is_a_list(path):
    edit_header(path / FIRST, lambda h: b"[1, 2, 3]")


def damage_overlap(path):
    edit_header(path / FIRST, moved("model.norm.weight", -4, -4))


def damage_misaligned(path):
    edit_header(path / FIRST, moved("model.norm.weight", 4, 4))


def damage_offsets_do_not_fit_shape(path):
    edit_header(path / FIRST, moved("model.norm.weight", 0, 4))


def damage_unknown_dtype(path):
    edit_header(path / FIRST, lambda h: h | {"model.norm.weight": h["model.norm.weight"] | {"dtype": "F33"}})


def damage_dtype_is_an_object(path):
    edit_header(path / FIRST, lambda h: h | {"model.norm.weight": h["model.norm.weight"] | {"dtype": {}}})


def damage_header_nests_without_end(path):
    edit_header(path / FIRST, lambda h: b'{"a": ' + b"[" * 100_000)


def damage_broken_index(path):
    truncate(path / INDEX, keep=lambda size: size // 2)


def damage_index_without_map(path):
    edit_json(path / INDEX, lambda data: data.pop("weight_map"))


def damage_index_points_outside(path):
    edit_json(path / INDEX, lambda data: data["weight_map"].update({GATE: "../elsewhere.safetensors"}))


def damage_index_names_wrong_shard(path):
    edit_json(path / INDEX, lambda data: data["weight_map"].update({"lm_head.weight": LAST}))


def damage_tensor_not_in_index(path):
    edit_json(path / INDEX, lambda data: data["weight_map"].pop(GATE))


def damage_no_weights(path):
    for file in path.glob("model*"):
        file.unlink()


def damage_missing_field(path):
    edit_json(path / "config.json", lambda data: data.pop("kv_lora_rank"))


def damage_number_of_thousands_of_digits(path):
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"vocab_size": ', f'"vocab_size": {"9" * 5000}'))


def damage_layers_without_end(path):
    edit_json(path / "config.json", lambda data: data.update(num_hidden_layers=2**40))


def damage_experts_without_end(path):
    edit_json(path / "config.json", lambda data: data.update(n_routed_experts=10**6))


def damage_unknown_architecture(path):
    edit_json(path / "config.json", lambda data: data.update(architectures=["MysteryForCausalLM"]))


def damage_generation_config(path):
    (path / "generation_config.json").write_text('{"eos_token_id": "end"}')


def damage_no_tokenizer(path):
    (path / "tokenizer.json").unlink()


def damage_broken_tokenizer(path):
    truncate(path / "tokenizer.json", keep=lambda size: size // 2)


CASES = [
    (damage_missing_shard, [LAST, "file not found", INDEX, "tensors are missing, first: model.layers.2.mlp"]),
    (damage_truncated_data, [LAST, "truncated", "model.layers.2.mlp.experts"]),
    (damage_truncated_header, [FIRST, "truncated or not safetensors: header of"]),
    (damage_empty_file, [FIRST, "truncated: 0 bytes"]),
    (damage_trailing_bytes, [FIRST, "12 bytes after the last tensor"]),
    (damage_wrong_dtype, [f"tensor {GATE}", "dtype I64: must be F32, BF16, F16"]),
    (damage_fp8, [f"tensor {GATE}", "dtype F8_E4M3: quantised weights are not supported"]),
    (damage_wrong_shape, [f"tensor {GATE}", "shape must be [32, 32], found [31, 32]"]),
    (damage_nan_bias, [f"tensor {BIAS}", "1 of its values are NaN or infinite, first: [5]"]),
    (damage_infinite_bf16_bias, [f"tensor {BIAS}", "1 of its values are NaN or infinite, first: [3]"]),
    (damage_missing_tensor, [f"tensor {GATE} is missing"]),
    (damage_missing_expert, ["3 tensors are missing, first: model.layers.2.mlp.experts.31.gate_proj.weight"]),
    (damage_extra_tensor, ["tensor model.layers.1.mlp.gate.bias is not part of the model", ".safetensors"]),
    (damage_duplicate_tensor, ["tensor model.norm.weight is also in", ".safetensors"]),
    (damage_duplicate_in_header, [FIRST, "'model.embed_tokens.weight' appears twice in the header"]),
    (damage_broken_header, [FIRST, "the header is not valid JSON"]),
    (damage_header_is_a_list, [FIRST, "the header must be a JSON object, found list"]),
    (damage_overlap, [FIRST, "tensor model.norm.weight: its data overlap"]),
    (damage_misaligned, [FIRST, "tensor model.norm.weight: misaligned, 4 bytes"]),
    (damage_offsets_do_not_fit_shape, [FIRST, "tensor model.norm.weight: F32 [32] takes 128 bytes"]),
    (damage_unknown_dtype, [FIRST, "tensor model.norm.weight: unknown dtype 'F33'"]),
    (damage_dtype_is_an_object, [FIRST, "tensor model.norm.weight: unknown dtype {}"]),
    (damage_header_nests_without_end, [FIRST, "the header is not valid JSON"]),
    (damage_broken_index, [INDEX, "not valid JSON"]),
    (damage_index_without_map, [INDEX, "field 'weight_map'"]),
    (damage_index_points_outside, [INDEX, GATE, "'../elsewhere.safetensors' is not a file name"]),
    (damage_index_names_wrong_shard, [LAST, f"tensor lm_head.weight is missing, named by {INDEX}"]),
    (damage_tensor_not_in_index, [f"tensor {GATE} is not named by {INDEX}"]),
    (damage_no_weights, [f"holds neither {INDEX} nor model.safetensors"]),
    (damage_missing_field, ["config.json", "field 'kv_lora_rank' is missing"]),
    (damage_number_of_thousands_of_digits, ["config.json", "not valid JSON"]),
    (damage_layers_without_end, ["config.json", "field 'num_hidden_layers' must be at most 4096"]),
    (damage_experts_without_end, ["config.json", "field 'n_routed_experts' must be at most 65536"]),
    (damage_unknown_architecture, ["config.json", "MysteryForCausalLM", "qwen3_moe (Qwen3MoeForCausalLM)"]),
    (damage_generation_config, ["generation_config.json", "field 'eos_token_id' must be integers"]),
    (damage_no_tokenizer, ["tokenizer.json: file not found"]),
    (damage_broken_tokenizer, ["tokenizer.json: not a tokenizer"]),
]


@pytest.mark.parametrize(
    ("damage", "parts"), CASES, ids=[d.__name__.removeprefix("damage_") for d, _ in CASES]
)
def test_damage_is_named(path, damage, parts):
    check(path)
    damage(path)
    with pytest.raises(CheckpointError) as raised:
        check(path)
    message = str(raised.value)
    assert str(path) in message
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "tensor", ["model.layers.2.mlp.experts.9.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"]
)
def test_bad_weights_are_named_when_loaded(path, tensor, value):
    edit_tensors(path, tensor, set_value(tensor, value))
    check(path)  # weights are too many to be read before ranks start
    targets = registry.tensor_targets(registry.read_spec(path))
    parameters: dict[str, torch.Tensor] = {}
    for t in targets:
        slots = () if t.moe_layer is None else (32,)
        rows = t.row_start + t.shape[0]
        if t.parameter in parameters:
            rows = max(rows, parameters[t.parameter].shape[len(slots)])
        parameters[t.parameter] = torch.zeros(*slots, rows, *t.shape[1:])
    with (
        Checkpoint.open(path) as checkpoint,
        pytest.raises(CheckpointError, match=rf"{re.escape(tensor)}: 1 of its values are NaN or infinite"),
    ):
        load_rank(checkpoint, targets, parameters, lambda layer: np.arange(32, dtype=np.int32))


def test_a_file_that_shrinks_after_it_was_opened(path):
    with Checkpoint.open(path) as checkpoint:
        entry = checkpoint.entries["lm_head.weight"]
        truncate(entry.file, keep=lambda size: entry.offset + 10)
        with pytest.raises(
            CheckpointError, match=r"lm_head\.weight: cannot be read: the file ends before it"
        ):
            checkpoint.read_into(entry, memoryview(bytearray(entry.nbytes)))


def test_a_single_file_without_index_is_fine(path):
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("model-*")):
        tensors |= load_file(file)
        file.unlink()
    (path / INDEX).unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    check(path)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.entries.keys() == tensors.keys()


def test_mtp_tensors_are_skipped(path):
    mtp = "model.layers.3.eh_proj.weight"
    edit_tensors(path, GATE, lambda t: entry(t, mtp, torch.zeros(32, 64)))
    with pytest.raises(CheckpointError, match=mtp):
        check(path)
    edit_json(path / "config.json", lambda data: data.update(num_nextn_predict_layers=1))
    check(path)


def test_no_descriptor_stays_open(path):
    before = len(os.listdir("/proc/self/fd"))
    check(path)
    damage_truncated_data(path)
    with pytest.raises(CheckpointError):
        check(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_validation_imports_no_torch(path):
    code = """
import sys
from pathlib import Path
from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.models.families import registry
path = Path(sys.argv[1])
spec = registry.read_spec(path)
with Checkpoint.open(path) as checkpoint:
    checkpoint.validate(registry.tensor_targets(spec), lambda name: registry.skipped_tensor(spec, name))
    assert checkpoint.bytes_read - checkpoint.metadata_bytes == 2 * 32 * 4, checkpoint.bytes_read
Tokenizer(path)
loaded = {"torch", "transformers", "safetensors"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
