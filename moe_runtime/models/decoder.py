"""Decoder: one model, assembled from a ModelSpec for one rank.

Owns embedding, layers, final norm and output head. Parameter names are those of
`moe_runtime.spec.weights`; values come from the loader. T rows, N sampled rows, H hidden, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_runtime.expert_parallel.buffer import Buffers
from moe_runtime.kernels import registry
from moe_runtime.kernels.chip import require_kernels
from moe_runtime.kernels.registry import Kernels
from moe_runtime.models.context import StepContext
from moe_runtime.models.layer import DecoderLayer, DenseLayer, MoeLayer, SlotChooser
from moe_runtime.models.ops import Ops, column
from moe_runtime.models.parameters import Weight
from moe_runtime.models.rope import Rope
from moe_runtime.spec.limits import DispatchMode
from moe_runtime.spec.model import ModelSpec


class Embedding(Weight):
    """Token embeddings."""

    def forward(self, step: StepContext) -> Tensor:
        """[T, H]: a fresh tensor, which the first layer may overwrite."""
        return F.embedding(step.token_ids_T, self.weight)


class Decoder(nn.Module):
    """`embed(step)`, then each of `layers` (generators, driven by the engine), then `logits`.

    Steps may have any of `dispatch_modes`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: Sequence[DecoderLayer],
        *,
        dispatch_modes: tuple[DispatchMode, ...],
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.dispatch_modes = spec, dispatch_modes
        self._ops, self._prepared = ops, False
        self.embed = Embedding(spec.vocab_size, spec.hidden, dtype=dtype, device=device)
        self.layers = nn.ModuleList(layers)
        self.norm = Weight(spec.hidden, dtype=dtype, device=device)
        head = self.embed if spec.tie_embeddings else None
        self.lm_head = head or Weight(spec.vocab_size, spec.hidden, dtype=dtype, device=device)

    def logits(self, x_NH: Tensor) -> Tensor:
        """fp32 [N, V] of hidden states after the last layer: final norm and output head.

        Hand it the sampled rows only; no other row needs the head.
        """
        h_NH = self._ops.rms_norm(x_NH, self.norm.weight, self.spec.norm_eps)
        logits_NV: Tensor = self._ops.linear(h_NH, self.lm_head.weight)
        return logits_NV.float()

    def prepare(self) -> None:
        """Lay the weights out for the device, once they are filled; a decoder also runs without.

        Works in place: afterwards `tensors` holds the same bytes per parameter (per slot, where
        there are slots) in another order, and must not be filled from a checkpoint again.
        """
        assert not self._prepared, "weights are packed once"
        self._prepared = True
        for layer in self._decoder_layers():
            layer.prepare()
        if self.lm_head is not self.embed:  # token embeddings are looked up by row
            self.lm_head.pack(self._ops.pack)

    def _decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def tensors(self) -> Mapping[str, Tensor]:
        """Every parameter once, by name, for the loader; a tied head is the embedding's."""
        return dict(self.named_parameters())


def build_decoder(
    spec: ModelSpec,
    *,
    slots_per_rank: int,
    buffers: Buffers,
    slot_tables: Sequence[SlotChooser],
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
    kernels: Kernels = registry,
) -> Decoder:
    """A decoder with uninitialised parameters.

    `slot_tables` has one entry per MoE layer, in order; `slots_per_rank` is how many experts'
    weights each MoE layer holds here. `deterministic`: a row's result does not depend on the rows
    beside it, bit for bit. `kernels` is asked once per operation. KernelError where none can run.
    """
    assert len(slot_tables) == spec.num_moe_layers, "one slot table per MoE layer"
    require_kernels(device)
    ops = Ops.of(kernels, column(device.type, deterministic=deterministic))
    rope = Rope(spec.rope, max_positions=spec.max_positions, device=device)
    layers: list[DecoderLayer] = []
    for layer in range(spec.num_layers):
        if layer not in spec.moe_layers:
            layers.append(DenseLayer(spec, layer, rope=rope, ops=ops, dtype=dtype, device=device))
            continue
        layers.append(
            MoeLayer(
                spec,
                layer,
                slots_per_rank=slots_per_rank,
                buffers=buffers,
                slots=slot_tables[spec.moe_layers.index(layer)],
                rope=rope,
                ops=ops,
                dtype=dtype,
                device=device,
            )
        )
    modes = tuple(buffers)
    return Decoder(spec, layers, dispatch_modes=modes, ops=ops, dtype=dtype, device=device)
