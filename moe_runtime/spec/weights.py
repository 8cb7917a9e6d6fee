"""TensorTarget: where a tensor of a checkpoint goes in the decoder. Pure data, no torch.

Families list targets, the reader validates a checkpoint against them, the loader walks them.
Parameter names of the decoder ({i} is the global layer index):

    embed.weight [V, H]            norm.weight [H]            lm_head.weight [V, H]
    layers.{i}.input_norm.weight                layers.{i}.post_attention_norm.weight      [H]
    layers.{i}.attention...  MLA:  qkv_a_proj.weight (rows: q_a, then kv_a; without q_lora q_proj.weight and
                                   kv_a_proj.weight), q_a_norm.weight, kv_a_norm.weight, q_b_proj.weight,
                                   kv_b_proj.weight, o_proj.weight
                             GQA:  qkv_proj.weight (rows: q, k, v) and .bias, q_norm.weight, k_norm.weight,
                                   o_proj.weight
    layers.{i}.mlp.gate_up_proj.weight (dense layers; rows: gate, up)  layers.{i}.mlp.down_proj.weight
    layers.{i}.moe.router.weight [E, H]                       layers.{i}.moe.router.correction_bias [E] fp32
    layers.{i}.moe.experts.gate_up [slots, 2I, H]             layers.{i}.moe.experts.down [slots, H, I]
    layers.{i}.moe.shared_experts.gate_up_proj.weight         layers.{i}.moe.shared_experts.down_proj.weight
                                   (unless they are served as slots: then they are experts E, E + 1, ...)
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTarget:
    """One checkpoint tensor and the rows of one parameter it fills.

    source     name in the checkpoint
    shape      shape it must have
    parameter  name in the decoder
    row_start  first row (axis 0, or axis 1 of a parameter with a slot axis) it fills
    part       (axis, start, stop): the part of the tensor that is used; None: all of it
    expert     expert id, None for weights every rank holds
    moe_layer  index among the MoE layers (row of a Placement), None without experts
    fp32       stored and kept as float32 whatever the model's dtype
    """

    source: str
    shape: tuple[int, ...]
    parameter: str
    row_start: int = 0
    part: tuple[int, int, int] | None = None
    expert: int | None = None
    moe_layer: int | None = None
    fp32: bool = False

    @property
    def used_shape(self) -> tuple[int, ...]:
        """Shape of what is used of the tensor."""
        if self.part is None:
            return self.shape
        axis, start, stop = self.part
        return (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
