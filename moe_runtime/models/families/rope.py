"""RopeSpec from either style of config: hub style (`rope_theta`, `rope_scaling`) and `rope_parameters`.

Owns the YaRN rules of transformers' modeling_rope_utils; knows nothing of tensors.
"""

import math

from moe_runtime.models.families.fields import ConfigFields
from moe_runtime.spec.model import RopeSpec

DEFAULT_THETA = 10000.0


def rope_spec(
    fields: ConfigFields, *, dim: int, interleaved: bool, max_positions: int, scale_softmax: bool
) -> RopeSpec:
    """The rotary embedding over `dim` values of a head.

    As in transformers, a non-empty `rope_scaling` beats `rope_parameters`, and `rope_theta` inside
    beats the one outside. `scale_softmax`: `mscale_all_dim` also scales the softmax (DeepSeek).
    """
    if dim % 2:
        raise fields.error("head_dim", f"must give an even rotary dimension, found {dim}")
    inner = fields.object("rope_scaling") or fields.object("rope_parameters")
    theta = fields.number("rope_theta", default=DEFAULT_THETA, minimum=1.0)
    if inner is None:
        return RopeSpec(dim=dim, theta=theta, interleaved=interleaved)
    theta = inner.number("rope_theta", default=theta, minimum=1.0)
    inner.only("partial_rotary_factor", (1, 1.0), default=1.0)
    kind = inner.text("rope_type", "type", default="default")
    if kind == "default":
        return RopeSpec(dim=dim, theta=theta, interleaved=interleaved)
    if kind != "yarn":
        raise inner.error("rope_type", f"= {kind!r} is not supported, only 'default' or 'yarn'")
    return _yarn(fields, inner, dim, theta, interleaved, max_positions, scale_softmax)


def _yarn(
    fields: ConfigFields,
    inner: ConfigFields,
    dim: int,
    theta: float,
    interleaved: bool,
    max_positions: int,
    scale_softmax: bool,
) -> RopeSpec:
    # A field of that name at the top of the config beats the one inside (standardize_rope_params).
    outer_original = fields.integer("original_max_position_embeddings", default=0, minimum=0)
    original = outer_original or inner.integer("original_max_position_embeddings", default=max_positions)
    factor = inner.number("factor", default=max_positions / original, minimum=1.0)
    mscale = inner.number("mscale", default=0.0)
    mscale_all_dim = inner.number("mscale_all_dim", default=0.0)
    if mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    else:
        attention_factor = yarn_mscale(factor)
    attention_factor = inner.number("attention_factor", default=attention_factor)
    softmax = yarn_mscale(factor, mscale_all_dim) ** 2 if scale_softmax and mscale_all_dim else 1.0
    return RopeSpec(
        dim=dim,
        theta=theta,
        interleaved=interleaved,
        factor=factor,
        original_max_positions=original,
        beta_fast=inner.number("beta_fast", default=32.0) or 32.0,
        beta_slow=inner.number("beta_slow", default=1.0) or 1.0,
        truncate=inner.flag("truncate", default=True),
        cos_sin_scale=attention_factor,
        softmax_scale=softmax,
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """0.1 m ln(s) + 1, the temperature of the YaRN paper (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
