"""Configs of the checkpoints `make-checkpoint` writes, by family and size.

Owns dimensions and special token ids; knows nothing of weights. Field names are the hub's.
"""

from typing import Any

BOS, EOS, PAD = 0, 1, 2
FAMILIES = ("deepseek_v3", "qwen3_moe")
SIZES = ("tiny", "small")

_COMMON: dict[str, Any] = {
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "use_cache": True,
}
_SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "small": {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Prompts of a few hundred tokens pass the original 256 positions; mscale and mscale_all_dim differ
# so that both the cos/sin scale and the softmax scale are other than 1.
_TINY_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
_DEEPSEEK: dict[str, dict[str, Any]] = {
    "tiny": {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_parameters": _TINY_YARN,
    },
    "small": {
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_parameters": _PLAIN_ROPE,
    },
}
_QWEN3: dict[str, dict[str, Any]] = {
    "tiny": {"num_key_value_heads": 2, "head_dim": 16, "rope_parameters": _PLAIN_ROPE},
    "small": {"num_key_value_heads": 2, "head_dim": 64, "rope_parameters": _PLAIN_ROPE},
}


def config(family: str, size: str, dtype: str) -> dict[str, Any]:
    """The config.json of a made checkpoint."""
    head = {"dtype": dtype, **_COMMON, **_SIZES[size]}
    if family == "qwen3_moe":
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": family,
            **head,
            "num_experts": 32,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": False,
            **_QWEN3[size],
        }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": family,
        **head,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "rope_interleave": True,
        **_DEEPSEEK[size],
    }
