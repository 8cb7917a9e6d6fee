"""The hardware table against the datasheet rows it was typed from."""

import csv
from pathlib import Path

import pytest

from moe_runtime.spec.hardware import HARDWARE

TABLE = Path(__file__).parents[3] / "shared" / "data" / "hardware.csv"


def test_entries_are_named_by_their_key_and_have_sane_numbers():
    assert "cpu-host" in HARDWARE
    for name, entry in HARDWARE.items():
        assert entry.name == name
        assert entry.source
        assert entry.memory_bytes >= 16e9
        assert 1e9 < entry.memory_bandwidth < 1e14
        assert all(rate >= 1e9 for rate in entry.flops.values())
        assert entry.scaleup_world >= 8


def test_h800_in_base_units():
    h800 = HARDWARE["h800"]
    assert (h800.memory_bytes, h800.memory_bandwidth) == (80 * 10**9, 3.35e12)
    assert (h800.flops["bfloat16"], h800.flops["float8_e4m3"]) == (989e12, 1979e12)
    assert (h800.scaleup_bandwidth, h800.rdma_bandwidth) == (200e9, 50e9)
    assert "float4_e2m1" not in h800.flops
    assert HARDWARE["gb200-nvl72"].rdma_bandwidth is None


@pytest.mark.skipif(not TABLE.exists(), reason="the datasheet table is not part of the repository")
def test_every_row_of_the_table():
    with TABLE.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(HARDWARE) - 1
    for row in rows:
        entry = HARDWARE[row["gpu"].lower().replace(" ", "-")]
        rates = {"float4_e2m1": "fp4_dense_TF", "float8_e4m3": "fp8_dense_TF", "bfloat16": "bf16_dense_TF"}
        assert entry.memory_bytes == float(row["hbm_GB"]) * 1e9
        assert entry.memory_bandwidth == float(row["hbm_TBps"]) * 1e12
        for dtype, column in rates.items():
            assert entry.flops.get(dtype, 0) == float(row[column] or 0) * 1e12
        assert entry.scaleup_bandwidth == float(row["scaleup_unidir_GBps"]) * 1e9
        assert entry.scaleup_world == int(row["scaleup_world"])
        assert (entry.rdma_bandwidth or 0) == float(row["rdma_GBps_per_gpu"] or 0) * 1e9
