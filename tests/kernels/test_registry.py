"""The table of kernels: every entry exists, devices fall back to the reference, names are checked."""

import pytest

from moe_runtime.kernels import registry
from moe_runtime.kernels.errors import KernelError


def test_every_entry_can_be_selected():
    for operation, row in registry.TABLE.items():
        assert "any" in row, f"{operation} has no reference"
        for device in (*row, "cuda"):
            function = registry.select(operation, device)
            assert function.__name__ == operation
            assert function.__doc__


def test_device_index_and_fallback():
    assert registry.select("linear", "cpu") is registry.select("linear", "cpu:0")
    assert registry.select("linear", "cuda:1") is registry.select("linear", "any")
    assert registry.select("linear", "cpu") is not registry.select("linear", "any")


def test_unknown_operation():
    with pytest.raises(KernelError, match="no operation 'conv'"):
        registry.select("conv", "cpu")
