"""Made checkpoints: same bytes for the same seed, loadable by transformers, spread logits, skewed routing."""

import hashlib
import json
import logging
import threading
import time
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from moe_runtime.checkpoint import make, shapes
from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.errors import InputError
from moe_runtime.models.families import registry

FAMILIES = ("deepseek_v3", "qwen3_moe")


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / request.param
    make_checkpoint(path, family=request.param, size="tiny")
    return path


@pytest.fixture(scope="module")
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny).eval()


def digests(path):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_same_bytes(tmp_path, family):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        make_checkpoint(tmp_path / name, family=family, size="tiny", seed=seed)
    a, b, c = (digests(tmp_path / name) for name in "abc")
    assert a == b
    assert {name for name in a if a[name] != c[name]} == {n for n in a if n.endswith(".safetensors")}


def test_tiny_is_a_few_hundred_kilobytes_in_several_shards(tiny):
    sizes = {p.name: p.stat().st_size for p in tiny.iterdir()}
    assert 300_000 < sum(sizes.values()) < 1_000_000
    assert sum(name.endswith(".safetensors") for name in sizes) >= 3
    index = json.loads((tiny / "model.safetensors.index.json").read_text())
    stored: dict[str, str] = {}
    for name in sizes:
        if name.endswith(".safetensors"):
            with safe_open(tiny / name, "pt") as file:
                stored |= dict.fromkeys(file.keys(), name)
    assert stored == index["weight_map"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_it_without_a_warning(tmp_path, family, dtype):
    make_checkpoint(tmp_path / "out", family=family, size="tiny", dtype=dtype)
    messages: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())

    handler = Collect(logging.WARNING)
    hf_logging.get_logger("transformers").addHandler(handler)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    finally:
        hf_logging.get_logger("transformers").removeHandler(handler)
    model, info = loaded
    assert messages == []
    assert {k: v for k, v in info.items() if v} == {}
    assert model.dtype == getattr(torch, dtype)
    spec = registry.read_spec(tmp_path / "out")
    assert (spec.family, spec.dtype, spec.eos_token_ids, spec.bos_token_id) == (family, dtype, (1,), 0)
    assert model.generation_config.eos_token_id == 1


def test_correction_bias_stays_float32(tmp_path):
    make_checkpoint(tmp_path / "out", family="deepseek_v3", size="tiny", dtype="bfloat16")
    kinds: dict[str, torch.dtype] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            kinds |= {name: tensors.get_tensor(name).dtype for name in tensors.keys()}  # noqa: SIM118
    assert {d for n, d in kinds.items() if n.endswith("e_score_correction_bias")} == {torch.float32}
    assert {d for n, d in kinds.items() if not n.endswith("e_score_correction_bias")} == {torch.bfloat16}


@torch.no_grad()
def test_logits_are_spread_and_activations_are_moderate(model):
    scales = []
    hooks = [
        layer.register_forward_hook(lambda m, a, out: scales.append(out.std()))
        for layer in model.model.layers
    ]
    logits = model(random_tokens(8, 128)).logits
    for hook in hooks:
        hook.remove()
    assert 2.0 < logits.std() < 4.0
    assert 0.5 < min(scales) <= max(scales) < 5.0
    best = logits.topk(2, -1).values
    assert ((best[..., 0] - best[..., 1]) > 1e-3).float().mean() > 0.99
    assert logits.argmax(-1).unique().numel() > 200


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 40, 300])
def test_greedy_output_is_varied(model, length):
    prompt = random_tokens(1, length)
    out = model.generate(
        prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, attention_mask=torch.ones_like(prompt)
    )
    assert out[0, length:].unique().numel() >= 24


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_expert_load_is_skewed_like_real_traffic(tmp_path, family, seed):
    """Max/mean of a layer's expert load on random prompts: 3-8, capped at 0.6 E/K = 4.8."""
    make_checkpoint(tmp_path / "out", family=family, size="tiny", seed=seed)
    routed = route(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval())
    spec = registry.read_spec(tmp_path / "out")
    assert len(routed) == spec.num_moe_layers
    for _, chosen_TK in routed.values():
        load_E = torch.bincount(chosen_TK.flatten(), minlength=32).float()
        assert 3.0 <= load_E.max() / load_E.mean() <= 0.6 * 32 / 4
        assert (load_E > 0).sum() >= 28


@torch.no_grad()
def test_groups_and_bias_decide_some_routes(tmp_path):
    make_checkpoint(tmp_path / "out", family="deepseek_v3", size="tiny")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    for name, (logits_TE, chosen_TK) in route(model).items():
        scores_TE, bias_E = logits_TE.sigmoid(), model.get_submodule(name).e_score_correction_bias
        chosen = chosen_TK.sort(-1).values
        without_groups = (scores_TE + bias_E).topk(4, -1).indices.sort(-1).values
        without_bias = masked_to_groups(scores_TE).topk(4, -1).indices.sort(-1).values
        assert 0.1 < (chosen != without_groups).any(-1).float().mean() < 0.95
        assert (chosen != without_bias).any(-1).float().mean() > 0.05


def masked_to_groups(scores_TE):
    groups = scores_TE.view(len(scores_TE), 4, 8)
    kept = groups.topk(2, -1).values.sum(-1).topk(2, -1).indices
    mask = torch.zeros(len(scores_TE), 4, dtype=torch.bool).scatter_(1, kept, True)
    return scores_TE.masked_fill(~mask.repeat_interleave(8, 1), -1.0)


def random_tokens(batch, length):
    return torch.randint(3, 512, (batch, length), generator=torch.Generator().manual_seed(length))


def route(model):
    """Per MoE layer (router logits [T, E], expert ids [T, K]) on random prompts."""
    routed = {}
    hooks = [
        module.register_forward_hook(lambda m, a, out, name=name: routed.update({name: (out[0], out[2])}))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    model(random_tokens(16, 128))
    for hook in hooks:
        hook.remove()
    return routed


def test_tokenizer_agrees_with_transformers_and_covers_every_id(tiny):
    ours, theirs = Tokenizer(tiny), AutoTokenizer.from_pretrained(tiny)
    spec = registry.read_spec(tiny)
    assert ours.vocab_size == len(theirs) == spec.vocab_size == 512
    for text in ("The number of people was 1995.", "naïve 東京 \n\ttabs", ""):
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text
        assert ours.decode([0, *ids, 1]) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    assert all(isinstance(ours.decode([i]), str) for i in range(512))


def test_its_chat_template_names_who_speaks(tiny):
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    prompt = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert prompt == "user: Hi\nassistant: Yes?\nassistant:"


def test_encoding_a_long_text_keeps_no_other_thread_waiting(tiny):
    tokenizer = Tokenizer(tiny)
    turns, seen = 0, []

    def encode():
        begun = turns
        tokenizer.encode("a lot " * 50_000)
        seen.append(turns - begun)

    thread = threading.Thread(target=encode)
    thread.start()
    while not seen:
        turns += 1
        time.sleep(0)
    thread.join()
    assert seen[0] > 250  # thousands; under a hundred if the interpreter is kept


def test_small_has_the_reference_dimensions():
    deepseek = shapes.config("deepseek_v3", "small", "float32")
    assert deepseek.items() >= {
        "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 4096,
        "intermediate_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 8,
        "num_key_value_heads": 8, "n_shared_experts": 1, "n_routed_experts": 32, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512, "q_lora_rank": 256, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "qk_nope_head_dim": 128, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }.items()  # fmt: skip
    qwen = shapes.config("qwen3_moe", "small", "float32")
    assert qwen.items() >= {
        "vocab_size": 8192, "hidden_size": 512, "num_hidden_layers": 8, "max_position_embeddings": 4096,
        "intermediate_size": 1024, "moe_intermediate_size": 256, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }.items()  # fmt: skip


@pytest.mark.parametrize("occupied", ["file", "full"])
def test_an_occupied_path_is_refused_and_left_alone(tmp_path, occupied):
    out = tmp_path / "out"
    if occupied == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not an empty directory"):
        make_checkpoint(out, family="qwen3_moe", size="tiny")
    assert (out if occupied == "file" else out / "notes.txt").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_directory_and_missing_parents_are_fine(tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "a" / "b"):
        make_checkpoint(out, family="qwen3_moe", size="tiny")
        assert (out / "config.json").exists()


@pytest.mark.parametrize("error", [OSError, SafetensorError])
def test_nothing_is_left_when_writing_fails(tmp_path, monkeypatch, error):
    def fail(*_args, **_kwargs):
        raise error("disk full")

    monkeypatch.setattr(make, "save_file", fail)
    with pytest.raises(InputError, match="out: cannot be written: disk full"):
        make_checkpoint(tmp_path / "out", family="qwen3_moe", size="tiny")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "llama"}, "family = 'llama' must be one of deepseek_v3, qwen3_moe"),
        ({"size": "huge"}, "size = 'huge' must be one of tiny, small"),
        ({"dtype": "int8"}, "dtype = 'int8' must be one of float32"),
        ({"seed": -1}, "seed = -1 must be 0 or more"),
    ],
)
def test_bad_arguments(tmp_path, change, message):
    arguments = {"family": "qwen3_moe", "size": "tiny"} | change
    with pytest.raises(InputError, match=message):
        make_checkpoint(tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []
