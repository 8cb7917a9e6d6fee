"""The table of kernels: every entry exists, devices fall back to the reference, names are checked."""

from importlib.util import find_spec

import pytest

from moe_runtime.kernels import registry
from moe_runtime.kernels.errors import KernelError

LIBRARIES = {"deepgemm": "deep_gemm", "flash_mla": "flash_mla"}  # column -> package


def test_every_entry_can_be_selected():
    for operation, row in registry.TABLE.items():
        assert "any" in row, f"{operation} has no reference"
        for device in {*row, "cuda"} - LIBRARIES.keys():
            function = registry.select(operation, device)
            assert function.__name__ == operation
            assert function.__doc__


def test_libraries_are_looked_for_when_they_are_asked_for():
    for library, package in LIBRARIES.items():
        operations = [operation for operation, row in registry.TABLE.items() if library in row]
        assert operations
        for operation in operations:
            if find_spec(package) is None:
                with pytest.raises(KernelError, match="install"):
                    registry.select(operation, library)
            else:
                assert callable(registry.select(operation, library))


def test_forced_operations():
    forced = registry.Forced({"route": "any", "rope": "cpu"})
    assert forced.select("route", "cpu") is registry.select("route", "any")
    assert forced.select("linear", "cpu") is registry.select("linear", "cpu")
    modules = forced.modules("cuda")
    assert modules["route"] == "route.reference"
    assert modules["rope"] == "rope.cpu"
    assert modules["permute"] == "permute.triton"
    assert modules.keys() == registry.TABLE.keys()
    with pytest.raises(KernelError, match="route has no 'deepgemm'; it has any, cpu"):
        registry.Forced({"route": "deepgemm"})
    with pytest.raises(KernelError, match="no operation 'conv'"):
        registry.Forced({"conv": "any"})


def test_device_index_and_fallback():
    assert registry.select("linear", "cpu") is registry.select("linear", "cpu:0")
    assert registry.select("linear", "cuda:1") is registry.select("linear", "any")
    assert registry.select("linear", "cpu") is not registry.select("linear", "any")


def test_unknown_operation():
    with pytest.raises(KernelError, match="no operation 'conv'"):
        registry.select("conv", "cpu")
