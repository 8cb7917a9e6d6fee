"""The registry holds every tensor with an expert axis, or the rank does not start."""

import numpy as np
import pytest
import torch

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine.balancing.registry import register
from moe_runtime.models.decoder import Decoder
from moe_runtime.models.families.registry import tensor_targets
from moe_runtime.models.moe import Experts
from moe_runtime.spec.weights import TensorTarget
from tests.models.decoder_harness import load_decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> Decoder:
    folder = tmp_path_factory.mktemp("registry") / "tiny"
    make_checkpoint(folder, family="deepseek_v3", size="tiny")
    return load_decoder(folder)


def experts_of(decoder: Decoder) -> Experts:
    return next(m for m in decoder.modules() if isinstance(m, Experts))


def test_an_expert_is_its_byte_ranges_in_every_tensor(decoder):
    registry = register(decoder, tensor_targets(decoder.spec))
    assert len(registry.tensors) == decoder.spec.num_moe_layers
    experts = experts_of(decoder)
    size = sum(p[0].numel() * p.element_size() for p in experts.parameters())
    assert registry.slot_bytes == size
    assert registry.num_slots == decoder.spec.moe.num_experts
    assert [name for name, _ in registry.tensors[0]] == ["gate_up", "down"]
    before = [registry.checksum(0, slot) for slot in range(registry.num_slots)]
    assert len(set(before)) == registry.num_slots
    # Copying a slot's ranges is copying the expert, and nothing else.
    for target, source in zip(registry.parts(0, 2), registry.parts(0, 5), strict=True):
        kept = target.copy()
        target[:] = source
        assert registry.checksum(0, 2) != before[2]
        target[:] = kept
    for target, source in zip(registry.parts(0, 2), registry.parts(0, 5), strict=True):
        target[:] = source
    after = [registry.checksum(0, slot) for slot in range(registry.num_slots)]
    assert after == [*before[:2], before[5], *before[3:]]
    assert torch.equal(experts.down[2], experts.down[5])
    assert np.shares_memory(registry.tensors[0][1][1], experts.down.data.numpy())


def test_a_new_parameter_with_an_expert_axis_is_moved_too(decoder):
    """Block scales, say: 2^e for expert e."""
    experts = experts_of(decoder)
    slots = len(experts.down)
    scales = torch.nn.Parameter(2.0 ** torch.arange(slots)[:, None], requires_grad=False)
    experts.register_parameter("down_scale", scales)
    try:
        registry = register(decoder, tensor_targets(decoder.spec))
        assert [name for name, _ in registry.tensors[0]] == ["gate_up", "down", "down_scale"]
        for target, source in zip(registry.parts(0, 1), registry.parts(0, 3), strict=True):
            target[:] = source
        assert scales[:4, 0].tolist() == [1.0, 8.0, 4.0, 8.0]
    finally:
        del experts.down_scale


def test_a_tensor_beside_the_parameters_is_refused(decoder):
    experts = experts_of(decoder)
    experts.scales = torch.ones(len(experts.down))
    try:
        with pytest.raises(AssertionError, match="scales"):
            register(decoder, tensor_targets(decoder.spec))
    finally:
        del experts.scales


def test_what_the_loader_fills_expert_by_expert_has_to_be_registered(decoder):
    target = TensorTarget(
        source="x", shape=(1,), parameter="layers.1.moe.router.correction_bias", expert=0, moe_layer=0
    )
    with pytest.raises(AssertionError, match="correction_bias"):
        register(decoder, [*tensor_targets(decoder.spec), target])
