"""chip_of against device properties as torch reports them for either maker, without a device."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.kernels import chip
from moe_runtime.kernels.aot.case import GFX_942, SM_90, SM_100
from moe_runtime.kernels.errors import KernelError


def target(monkeypatch, *, name: str, major: int, arch: str, hip: str | None):
    properties = SimpleNamespace(name=name, major=major, gcnArchName=arch, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    chip._chip.cache_clear()
    try:
        x: Any = SimpleNamespace(device=torch.device("cuda", 0))
        return chip.chip_of(x).target
    finally:
        chip._chip.cache_clear()


def test_nvidia(monkeypatch):
    """torch gives the device's name as gcnArchName in its CUDA builds."""
    h200, b200, a100 = "NVIDIA H200", "NVIDIA B200", "NVIDIA A100-SXM4-80GB"
    assert target(monkeypatch, name=h200, major=9, arch=h200, hip=None) is SM_90
    assert target(monkeypatch, name=b200, major=10, arch=b200, hip=None) is SM_100
    with pytest.raises(KernelError, match=f"no kernels for {a100}.*sm_90"):
        target(monkeypatch, name=a100, major=8, arch=a100, hip=None)


def test_amd(monkeypatch):
    """The capability of a gfx942 is 9.4, as if it were Hopper's."""
    name = "AMD Instinct MI300X"
    assert target(monkeypatch, name=name, major=9, arch="gfx942:sramecc+:xnack-", hip="6.4") is GFX_942
    with pytest.raises(KernelError, match=name):
        target(monkeypatch, name=name, major=9, arch="gfx90a:sramecc+:xnack-", hip="6.4")


def test_a_decoder_is_refused_before_its_weights_are_read(monkeypatch):
    """Found out at the first launch, an old chip would cost the time of reading the weights."""
    properties = SimpleNamespace(name="NVIDIA T4", major=7, gcnArchName="", multi_processor_count=40)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    chip._chip.cache_clear()
    for device in ("cuda", "cuda:1"):
        with pytest.raises(KernelError, match="no kernels for NVIDIA T4"):
            chip.require_kernels(torch.device(device))
    chip._chip.cache_clear()
    chip.require_kernels(torch.device("cpu"))
