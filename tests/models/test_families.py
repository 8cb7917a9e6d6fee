"""Hub configs against transformers' own classes: sizes, RoPE numbers, tensor names and shapes."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from moe_runtime.errors import CheckpointError
from moe_runtime.models.families import registry
from moe_runtime.spec.model import GqaSpec, MlaSpec

DEEPSEEK_V3 = json.loads("""{
  "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
  "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
  "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
  "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
  "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
  "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
  "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                          "weight_block_size": [128, 128]},
  "rms_norm_eps": 1e-06,
  "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                   "original_max_position_embeddings": 4096, "type": "yarn"},
  "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false,
  "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": true, "v_head_dim": 128,
  "vocab_size": 129280
}""")
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 2.827,
    "vocab_size": 163840,
}
QWEN3_235B = json.loads("""{
  "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
  "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
  "max_position_embeddings": 40960, "max_window_layers": 94, "mlp_only_layers": [], "model_type": "qwen3_moe",
  "moe_intermediate_size": 1536, "norm_topk_prob": true, "num_attention_heads": 64, "num_experts": 128,
  "num_experts_per_tok": 8, "num_hidden_layers": 94, "num_key_value_heads": 4, "output_router_logits": false,
  "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
  "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
  "use_sliding_window": false, "vocab_size": 151936
}""")
QWEN3_30B = QWEN3_235B | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
}
# As the model card tells users to set it for long contexts.
QWEN3_YARN = QWEN3_30B | {
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
}
HUB = {
    "deepseek-v3": (DEEPSEEK_V3, DeepseekV3Config, DeepseekV3ForCausalLM),
    "kimi-k2": (KIMI_K2, DeepseekV3Config, DeepseekV3ForCausalLM),
    "qwen3-235b": (QWEN3_235B, Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3-30b": (QWEN3_30B, Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3-30b-yarn": (QWEN3_YARN, Qwen3MoeConfig, Qwen3MoeForCausalLM),
}


def spec_of(config):
    return registry.spec_from_config(config, path=Path("config.json"))


def hf_config(config, cls):
    """The config as transformers sees it; its own weights' dtype and quantisation play no part."""
    kept = {
        k: v for k, v in config.items() if k not in ("quantization_config", "architectures", "model_type")
    }
    return cls(**json.loads(json.dumps(kept)))


def inverse_frequencies(rope):
    """Rotary frequencies by the formula of the YaRN paper, float64, from a RopeSpec alone."""
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim
    plain = rope.theta**-exponents
    if rope.factor == 1.0:
        return plain

    def boundary(rotations):
        return (
            rope.dim
            * math.log(rope.original_max_positions / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = boundary(rope.beta_fast), boundary(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float64) - low) / (high - low if high != low else 1e-3)
    share = ramp.clamp(0, 1)
    return plain / rope.factor * share + plain * (1 - share)


@pytest.mark.parametrize("name", HUB)
def test_sizes_equal_transformers(name):
    config, cls, _ = HUB[name]
    spec, hf = spec_of(config), hf_config(config, cls)
    assert (spec.vocab_size, spec.hidden, spec.num_layers) == (
        hf.vocab_size,
        hf.hidden_size,
        hf.num_hidden_layers,
    )
    assert spec.max_positions == hf.max_position_embeddings
    assert spec.norm_eps == hf.rms_norm_eps
    assert spec.eos_token_ids == (hf.eos_token_id,)
    assert spec.bos_token_id == hf.bos_token_id
    assert spec.dtype == "bfloat16"
    assert not spec.tie_embeddings
    assert spec.moe.router.top_k == hf.num_experts_per_tok
    assert spec.moe.router.normalize is hf.norm_topk_prob
    if cls is DeepseekV3Config:
        assert isinstance(spec.attention, MlaSpec)
        assert spec.attention.num_heads == hf.num_attention_heads
        assert spec.attention.qk_head_dim == hf.qk_head_dim
        assert spec.moe.num_experts == hf.n_routed_experts
        router = spec.moe.router
        assert (router.num_groups, router.kept_groups) == (hf.n_group, hf.topk_group)
        assert (router.scoring, router.correction_bias) == ("sigmoid", True)
        assert (router.scale, router.weight_epsilon) == (hf.routed_scaling_factor, 1e-20)
        assert router.masked_group_score == -math.inf
        assert spec.moe_layers == tuple(range(hf.first_k_dense_replace, hf.num_hidden_layers))
        assert spec.mtp_layers == config["num_nextn_predict_layers"]
    else:
        assert isinstance(spec.attention, GqaSpec)
        assert spec.attention.num_kv_heads == hf.num_key_value_heads
        assert spec.attention.head_dim == hf.head_dim
        assert spec.moe.num_experts == hf.num_experts
        assert (spec.moe.router.scoring, spec.moe.router.scale) == ("softmax", 1.0)
        assert spec.moe_layers == tuple(range(hf.num_hidden_layers))


ROPE_VARIANTS = {
    "no-mscale": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 4096},
    "only-mscale": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 4096, "mscale": 0.7},
    "unequal": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
    },
    "untruncated": {
        "rope_type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 2048,
        "truncate": False,
        "beta_fast": 16,
    },
    "given-factor": {
        "rope_type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 2048,
        "attention_factor": 1.25,
    },
    "no-original": {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}


@pytest.mark.parametrize(
    ("config", "cls"),
    [pytest.param(c, k, id=name) for name, (c, k, _) in HUB.items()]
    + [
        pytest.param(DEEPSEEK_V3 | {"rope_scaling": v}, DeepseekV3Config, id=n)
        for n, v in ROPE_VARIANTS.items()
    ]
    + [
        pytest.param(QWEN3_30B | {"rope_scaling": v}, Qwen3MoeConfig, id=f"qwen-{n}")
        for n, v in ROPE_VARIANTS.items()
    ],
)
def test_rope_equals_transformers(config, cls):
    spec, hf = spec_of(config), hf_config(config, cls)
    kind = hf.rope_parameters["rope_type"]
    if kind == "default":
        head = spec.rope.dim
        expected = hf.rope_parameters["rope_theta"] ** -(torch.arange(0, head, 2, dtype=torch.float64) / head)
        scale = 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[kind](hf)
    torch.testing.assert_close(inverse_frequencies(spec.rope).float(), expected.float(), rtol=2e-6, atol=0.0)
    assert spec.rope.cos_sin_scale == pytest.approx(scale, rel=1e-12)
    assert spec.rope.interleaved is (cls is DeepseekV3Config)
    if cls is DeepseekV3Config:
        with torch.device("meta"):
            scaling = DeepseekV3Attention(hf, 0).scaling
        assert spec.softmax_scale == pytest.approx(scaling, rel=1e-12)
    else:
        assert spec.softmax_scale == pytest.approx(hf.head_dim**-0.5, rel=1e-12)


@pytest.mark.parametrize("name", HUB)
def test_both_config_styles_give_the_same_spec(name):
    config, cls, _ = HUB[name]
    new_style = hf_config(config, cls).to_dict()
    assert "rope_theta" not in new_style
    assert "rope_parameters" in new_style
    new_style["architectures"] = config["architectures"]
    new_style["dtype"] = "bfloat16"
    new_style["num_nextn_predict_layers"] = config.get("num_nextn_predict_layers", 0)
    assert spec_of(new_style) == spec_of(config)


@pytest.mark.parametrize(
    ("config", "cls", "model"),
    [
        pytest.param(
            DEEPSEEK_V3 | {"num_hidden_layers": 5}, DeepseekV3Config, DeepseekV3ForCausalLM, id="deepseek-v3"
        ),
        pytest.param(
            KIMI_K2 | {"num_hidden_layers": 3}, DeepseekV3Config, DeepseekV3ForCausalLM, id="kimi-k2"
        ),
        pytest.param(
            KIMI_K2 | {"num_hidden_layers": 2, "q_lora_rank": None, "n_shared_experts": 2},
            DeepseekV3Config,
            DeepseekV3ForCausalLM,
            id="no-q-lora",
        ),
        pytest.param(
            QWEN3_30B | {"num_hidden_layers": 3}, Qwen3MoeConfig, Qwen3MoeForCausalLM, id="qwen3-30b"
        ),
        pytest.param(
            QWEN3_30B | {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
            Qwen3MoeConfig,
            Qwen3MoeForCausalLM,
            id="qwen3-mixed",
        ),
    ],
)
def test_targets_are_the_tensors_of_the_model(config, cls, model):
    """Names and shapes against the model's own state; its fused experts are taken apart."""
    expected = {}
    with torch.device("meta"):
        state = model(hf_config(config, cls)).state_dict()
    for name, tensor in state.items():
        prefix, _, kind = name.rpartition(".experts.")
        if kind == "gate_up_proj":
            rows = tensor.shape[1] // 2
            for e in range(tensor.shape[0]):
                for half in ("gate_proj", "up_proj"):
                    expected[f"{prefix}.experts.{e}.{half}.weight"] = (rows, tensor.shape[2])
        elif kind == "down_proj":
            for e in range(tensor.shape[0]):
                expected[f"{prefix}.experts.{e}.down_proj.weight"] = tuple(tensor.shape[1:])
        else:
            expected[name] = tuple(tensor.shape)
    targets = registry.tensor_targets(spec_of(config))
    assert len(targets) == len({t.source for t in targets})
    assert {t.source: t.shape for t in targets} == expected


def test_deepseek_v3_has_its_published_number_of_parameters():
    # 671 billion (arXiv 2412.19437); the exact sum is that of the hub's tensors without the MTP layer.
    targets = registry.tensor_targets(spec_of(DEEPSEEK_V3))
    assert sum(math.prod(t.shape) for t in targets if not t.fp32) == 671_026_404_352


def test_rows_of_a_parameter_are_tiled_without_gap_or_overlap():
    for config in (DEEPSEEK_V3 | {"num_hidden_layers": 4}, QWEN3_30B | {"num_hidden_layers": 2}):
        pieces: dict[tuple[str, int | None], list[tuple[int, int]]] = {}
        for t in registry.tensor_targets(spec_of(config)):
            pieces.setdefault((t.parameter, t.expert), []).append((t.row_start, t.row_start + t.shape[0]))
        for rows in pieces.values():
            rows.sort()
            assert rows[0][0] == 0
            assert all(a[1] == b[0] for a, b in zip(rows, rows[1:], strict=False))


def test_tied_embeddings_need_no_head_and_skip_one():
    spec = spec_of(QWEN3_30B | {"tie_word_embeddings": True, "num_hidden_layers": 1})
    assert "lm_head.weight" not in {t.source for t in registry.tensor_targets(spec)}
    assert registry.skipped_tensor(spec, "lm_head.weight")
    assert not registry.skipped_tensor(spec_of(QWEN3_30B), "lm_head.weight")


def test_mtp_layers_are_skipped_and_others_are_not():
    spec = spec_of(DEEPSEEK_V3)
    assert registry.skipped_tensor(spec, "model.layers.61.eh_proj.weight")
    assert registry.skipped_tensor(spec, "model.layers.61.mlp.experts.255.up_proj.weight")
    assert not registry.skipped_tensor(spec, "model.layers.62.eh_proj.weight")
    assert not registry.skipped_tensor(spec, "model.layers.60.mlp.surprise.weight")
    assert not registry.skipped_tensor(spec_of(KIMI_K2), "model.layers.61.eh_proj.weight")


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 8], None, (7, 8)),
        (None, None, ()),
        (7, {"eos_token_id": [9, 10]}, (9, 10)),
        (7, {"eos_token_id": 9}, (9,)),
        (7, {"eos_token_id": None}, (7,)),
        (7, {}, (7,)),
    ],
)
def test_eos_token_ids(tmp_path, in_config, in_generation, expected):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B | {"eos_token_id": in_config}))
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    assert registry.read_spec(tmp_path).eos_token_ids == expected


def test_dtype_argument_beats_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B))
    assert registry.read_spec(tmp_path).dtype == "bfloat16"
    assert registry.read_spec(tmp_path, dtype="float32").dtype == "float32"


BAD_FIELDS = [
    ({"hidden_size": None}, "'hidden_size' is missing"),
    ({"hidden_size": "7168"}, "'hidden_size' must be an integer, found '7168'"),
    ({"hidden_size": True}, "'hidden_size' must be an integer, found True"),
    ({"vocab_size": 0}, "'vocab_size' must be at least 1, found 0"),
    ({"rms_norm_eps": "tiny"}, "'rms_norm_eps' must be a number"),
    ({"norm_topk_prob": 1}, "'norm_topk_prob' must be true or false"),
    ({"eos_token_id": 129280}, "'eos_token_id' = [129280] lies outside the vocabulary of 129280"),
    ({"eos_token_id": ["</s>"]}, "'eos_token_id' must be integers"),
    ({"n_group": 7}, "'n_group' = 7 must divide 256 experts"),
    ({"topk_group": 9}, "'topk_group' = 9 must not exceed n_group = 8"),
    ({"topk_group": 1, "num_experts_per_tok": 33}, "'num_experts_per_tok' = 33 must not exceed the 32"),
    ({"num_key_value_heads": 8}, "'num_key_value_heads' must equal num_attention_heads = 128"),
    ({"scoring_func": "softmax"}, "'scoring_func' = 'softmax' is not supported, only 'sigmoid'"),
    ({"hidden_act": "gelu"}, "'hidden_act' = 'gelu' is not supported"),
    ({"attention_bias": True}, "'attention_bias' = True is not supported"),
    ({"torch_dtype": "float8_e4m3fn"}, "'dtype' = 'float8_e4m3fn' is not supported"),
    ({"torch_dtype": None}, "'dtype' is missing"),
    ({"rope_scaling": "yarn"}, "'rope_scaling' must be an object"),
    (
        {"rope_scaling": {"type": "llama3", "factor": 8}},
        "'rope_scaling.rope_type' = 'llama3' is not supported",
    ),
    ({"rope_scaling": {"type": "yarn", "factor": "40"}}, "'rope_scaling.factor' must be a number"),
    ({"qk_rope_head_dim": 63}, "even rotary dimension, found 63"),
]


@pytest.mark.parametrize(("change", "message"), BAD_FIELDS)
def test_bad_fields_name_file_and_field(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | change))
    with pytest.raises(CheckpointError) as raised:
        registry.read_spec(tmp_path)
    assert str(tmp_path / "config.json") in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'architectures' = ['MambaForCausalLM'] is not a known"),
        ({"model_type": "mamba"}, "'model_type' = 'mamba' is not a known"),
        ({}, "'architectures' is missing"),
    ],
)
def test_unknown_architecture_names_the_known_families(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as raised:
        registry.read_spec(tmp_path)
    assert message in str(raised.value)
    assert "deepseek_v3 (DeepseekV3ForCausalLM); qwen3_moe (Qwen3MoeForCausalLM)" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"), [(None, "file not found"), ("{", "not valid JSON"), ("[]", "JSON object")]
)
def test_unreadable_config(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        registry.read_spec(tmp_path)


def test_model_type_serves_configs_without_architectures():
    config = {k: v for k, v in KIMI_K2.items() if k != "architectures"}
    assert spec_of(config) == spec_of(KIMI_K2)
