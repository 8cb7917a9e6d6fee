"""Decoder layers as generators: a `yield` names a place where the other micro-batch may take over.

A MoE layer has five stages: attention-1 | attention-2, route, dispatch | shared experts | experts, combine |
finish. The shared experts may stand behind the combine instead; they are added first in any case, so that a
row's sum is rounded in one way. With several dispatch rounds the last three yields come once per round, the
shared experts in the first. A dense layer has nothing to send and is one stage. Which places are used, and in
which order, is the driver's matter. Transport and tables are given at construction; a layer knows nothing of
ranks. T rows, H hidden, K top-k.

A layer owns the hidden state it is given: it adds to it in place and returns it.
"""

from collections.abc import Generator, Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from moe_runtime.expert_parallel.buffer import Buffers
from moe_runtime.models.attention.gqa import GqaAttention
from moe_runtime.models.attention.mla import MlaAttention
from moe_runtime.models.context import StepContext
from moe_runtime.models.mlp import GatedMlp
from moe_runtime.models.moe import MoeBlock
from moe_runtime.models.ops import Ops
from moe_runtime.models.parameters import Weight
from moe_runtime.models.rope import Rope
from moe_runtime.spec.model import MlaSpec, ModelSpec

# Where a layer may be left: behind the first half of attention, a dispatch, the shared experts, a combine.
Cut = Literal["attention", "dispatch", "shared", "combine"]
Stages = Generator[Cut, None, Tensor]


class SlotChooser(Protocol):
    """One MoE layer's slot table: which replica of its expert each pair goes to."""

    def choose(self, expert_ids_TK: Tensor, step: StepContext) -> Tensor: ...


class DecoderLayer(nn.Module):
    """What dense and MoE layers have in common: norms and attention."""

    def __init__(
        self, spec: ModelSpec, layer: int, *, rope: Rope, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._ops, self._eps = ops, spec.norm_eps
        attention = MlaAttention if isinstance(spec.attention, MlaSpec) else GqaAttention
        self.input_norm = Weight(spec.hidden, dtype=dtype, device=device)
        self.attention = attention(spec, layer, rope=rope, ops=ops, dtype=dtype, device=device)
        self.post_attention_norm = Weight(spec.hidden, dtype=dtype, device=device)

    def _norm(self, x_TH: Tensor, norm: Weight) -> Tensor:
        result: Tensor = self._ops.rms_norm(x_TH, norm.weight, self._eps)
        return result

    def prepare(self) -> None:
        """Pack the weights, once they are filled."""
        self.attention.prepare()

    def forward(self, x_TH: Tensor, step: StepContext) -> Stages:
        """COLLECTIVE in MoE layers: drive to the end; the new hidden state [T, H] is the return value."""
        raise NotImplementedError


class DenseLayer(DecoderLayer):
    """A layer with a plain MLP: it has nothing to send, and is one stage."""

    def __init__(
        self, spec: ModelSpec, layer: int, *, rope: Rope, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(spec, layer, rope=rope, ops=ops, dtype=dtype, device=device)
        self.mlp = GatedMlp(spec.hidden, spec.dense_intermediate, ops=ops, dtype=dtype, device=device)

    def prepare(self) -> None:
        super().prepare()
        self.mlp.prepare()

    def forward(self, x_TH: Tensor, step: StepContext) -> Stages:
        clock = step.clock
        clock.enter("attention")
        q = self.attention.project(self._norm(x_TH, self.input_norm), step)
        x_TH = self.attention.attend(q, step, add_to=x_TH)
        clock.enter("other")
        x_TH = self.mlp(self._norm(x_TH, self.post_attention_norm), add_to=x_TH)
        yield from ()  # a generator all the same, without a place to leave it
        return x_TH


class MoeLayer(DecoderLayer):
    """A layer with experts: the expert-parallel seam."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        *,
        slots_per_rank: int,
        buffers: Buffers,
        slots: SlotChooser,
        rope: Rope,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(spec, layer, rope=rope, ops=ops, dtype=dtype, device=device)
        self._by_mode, self._slots = buffers, slots
        self.moe = MoeBlock(spec, slots_per_rank=slots_per_rank, ops=ops, dtype=dtype, device=device)

    def prepare(self) -> None:
        super().prepare()
        self.moe.prepare()

    def forward(self, x_TH: Tensor, step: StepContext) -> Stages:
        clock, moe, buffer = step.clock, self.moe, self._by_mode[step.dispatch_mode]
        clock.enter("attention")
        q = self.attention.project(self._norm(x_TH, self.input_norm), step)
        yield "attention"
        clock.enter("attention")
        x_TH = self.attention.attend(q, step, add_to=x_TH)
        clock.enter("routing")
        h_TH = self._norm(x_TH, self.post_attention_norm)
        route = moe.router(h_TH)
        for index, part in enumerate(_rounds(step, h_TH.shape[0])):
            clock.enter("routing")
            # Pair indices restart per dispatch, so slots are chosen per round.
            slot_ids_TK = self._slots.choose(route.expert_ids_TK[part], step)
            clock.enter("dispatch")
            dispatched = buffer.dispatch(h_TH[part], slot_ids_TK, route.weights_TK[part])
            yield "dispatch"
            clock.enter("experts")
            if index == 0 and step.shared_beside == "dispatch":
                x_TH = moe.share(h_TH, add_to=x_TH)
            yield "shared"
            clock.enter("dispatch")
            rows = dispatched.wait()
            clock.enter("experts")
            y = moe.experts(rows)
            clock.enter("combine")
            combined = buffer.combine(y, rows)
            yield "combine"
            if index == 0 and step.shared_beside == "combine":
                clock.enter("experts")
                x_TH = moe.share(h_TH, add_to=x_TH)
            clock.enter("combine")
            x_TH[part] += combined.wait()
        clock.enter("other")
        return x_TH


def _rounds(step: StepContext, num_tokens: int) -> Iterator[slice]:
    """Row ranges of the dispatch rounds: as many as agreed, empty ones included."""
    if step.rounds == 1:
        yield slice(0, num_tokens)
        return
    assert num_tokens <= step.rounds * step.round_tokens, "more rows than the agreed rounds carry"
    for index in range(step.rounds):
        yield slice(index * step.round_tokens, (index + 1) * step.round_tokens)
