"""The readers of compiled code and the gates, on made-up code; and the representative cases, compiled.

Compilation runs in a child process: in this one triton may be interpreting.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moe_runtime.kernels import roofline, shapes
from moe_runtime.kernels.aot import code
from moe_runtime.kernels.aot.case import GFX_942, SM_90, SM_100, TARGETS, AotCase
from moe_runtime.kernels.aot.gates import EXPECTED, failures, occupancy

ROOT = Path(__file__).resolve().parents[2]
LOOP = code.Loop(instructions=100, matrix=4, loads={16: 8}, bulk=0)
GOOD = code.Compiled(
    registers=112,
    stack_bytes=0,
    spills=0,
    shared_bytes=73_728,
    tensor_memory=0,
    warps=4,
    matrix={"wgmma bf16": 4},
    loops=(LOOP,),
    whole=LOOP,
)
GEMM = AotCase(operation="gemm", label="test", kernel=None, signature={}, matrix="bf16", streams=True)


def test_a_good_gemm_passes_and_fits_three_times():
    assert failures(GEMM, SM_90, GOOD) == []
    assert occupancy(SM_90, GOOD) == 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"stack_bytes": 8}, "8 bytes of stack"),
        ({"spills": 3}, "3 spills"),
        ({"shared_bytes": 232_449}, "232449 bytes of shared memory, the chip has 232448"),
        ({"tensor_memory": 513}, "513 columns of tensor memory"),
        ({"matrix": {}}, "no wgmma bf16"),
        ({"matrix": {"wgmma bf16": 4, "mma.sync bf16": 1}}, "mma.sync bf16 instead of wgmma bf16"),
        ({"loops": (replace(LOOP, matrix=0),)}, "no matrix instruction in a main loop"),
        ({"loops": (replace(LOOP, loads={4: 2}),)}, "no 16-byte loads in a main loop"),
        ({"loops": (replace(LOOP, loads={2: 5, 16: 1}),)}, "5 loads of 2 bytes in main loops"),
    ],
)
def test_each_gate(change, problem):
    assert failures(GEMM, SM_90, replace(GOOD, **change)) == [problem]


def test_gates_of_other_kinds():
    fp8 = replace(GEMM, matrix="fp8")
    assert failures(fp8, SM_90, replace(GOOD, matrix={"wgmma f16": 4})) == [
        "wgmma f16 instead of wgmma e4m3",
        "no wgmma e4m3",
    ]
    small = replace(GEMM, matrix="small")
    assert failures(small, SM_90, replace(GOOD, matrix={"mma.sync f16": 4})) == []
    assert failures(small, SM_90, replace(GOOD, matrix={})) == ["no matrix instruction"]
    plain = replace(GEMM, matrix="none")
    assert failures(plain, SM_90, GOOD) == ["unexpected wgmma bf16"]
    assert failures(GEMM, GFX_942, replace(GOOD, matrix={"mfma bf16": 4})) == [
        "73728 bytes of shared memory, the chip has 65536"
    ]
    bulk = replace(LOOP, loads={}, bulk=2)
    assert failures(GEMM, SM_100, replace(GOOD, matrix={"tcgen05 f16": 4}, loops=(bulk,))) == []
    # Without a loop the whole kernel counts, and a rare narrow load is no problem.
    straight = replace(GOOD, matrix={}, loops=(), whole=replace(LOOP, matrix=0, loads={2: 1, 16: 8}))
    assert failures(plain, SM_90, straight) == []
    narrow = replace(straight, whole=replace(LOOP, matrix=0, loads={2: 8, 16: 8}))
    assert failures(plain, SM_90, narrow) == ["8 loads of 2 bytes in main loops"]
    assert EXPECTED.keys() == {target.name for target in TARGETS}


SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
        /*0010*/               @P0 LDG.E.U16 R2, desc[UR4][R2.64] ;   /* 0x0 */
        /*0020*/                   UTMALDG.2D [UR8], [UR6] ;   /* 0x0 */
        /*0030*/                   LDGSTS.E.BYPASS.128 [R0+0xc000], desc[UR20][R24.64], P2 ;   /* 0x0 */
        /*0040*/                   LDG.E R4, desc[UR4][R4.64] ;   /* 0x0 */
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;   /* 0x0 */
        /*0060*/              @!P6 BRA 0x30 ;   /* 0xfff */
        /*0070*/              @!P6 BRA 0x20 ;   /* 0xfff */
        /*0080*/                   STL [R1], R4 ;   /* 0x0 */
        /*0090*/                   BRA 0x90;   /* 0xfff */
"""


def test_main_loops_of_sass():
    """The inner loop is 0x30 to 0x60; the outer one, the trap at the end and the prologue do not count."""
    loops, whole = code.nvidia_loops(SASS)
    assert [(x.instructions, x.matrix, dict(x.loads), x.bulk) for x in loops] == [(4, 1, {16: 1, 4: 1}, 0)]
    assert (whole.instructions, dict(whole.loads), whole.bulk) == (10, {2: 1, 16: 1, 4: 1}, 1)
    assert code.local_memory_accesses(SASS) == 1


AMD = """
kernel:
; %bb.0:
	s_load_dwordx2 s[0:1], s[4:5], 0x0
	global_load_ushort v1, v2, off
.LBB0_1:                                ; =>This Loop Header: Depth=1
                                        ;     Child Loop BB0_2 Depth 2
	s_mov_b32 s3, 0
.LBB0_2:                                ;   Parent Loop BB0_1 Depth=1
                                        ; =>  This Inner Loop Header: Depth=2
	global_load_dwordx4 v[2:5], v[4:5], off
	v_mfma_f32_32x32x8_bf16 v[16:31], v[130:131], v[44:45], v[16:31]
	s_cbranch_scc0 .LBB0_2
; %bb.3:                                ;   in Loop: Header=BB0_1 Depth=1
	buffer_load_short_d16 v7, v8, s[0:3], 0 offen
	s_cbranch_scc0 .LBB0_1
; %bb.4:
	s_endpgm
"""


def test_main_loops_of_amd_assembly():
    loops, whole = code.amd_loops(AMD)
    assert [(x.instructions, x.matrix, dict(x.loads)) for x in loops] == [(3, 1, {16: 1})]
    assert dict(whole.loads) == {2: 2, 16: 1}


def test_matrix_instructions():
    text = """
        wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {%r1}, %rd1, %rd2, p, 1, 1;
        wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%r1}, %rd1, %rd2, p, 1, 1;
        tcgen05.mma.cta_group::1.kind::f8f6f4 [%r1], %rd1, %rd2, %r2, p;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f2};
        v_mfma_f32_32x32x16_fp8_fp8 v[16:31], v[88:89], v[32:33], v[16:31]
        v_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
    """
    kinds = ("wgmma e4m3", "wgmma bf16", "tcgen05 f8f6f4", "mma.sync bf16", "mfma fp8", "mfma bf16")
    assert code.matrix_instructions(text) == dict.fromkeys(kinds, 1)


def test_roofline():
    """By hand: 9 slots of DeepSeek-V3, 4 rows each: the weights, one byte each, set the floor."""
    work = roofline.grouped_gemm(9, 4, 4096, 7168, "fp8_block")
    weights = 9 * 4096 * 7168
    assert work.bytes == pytest.approx(weights * (1 + 4 / 16384) + 36 * (7168 * 1.03125 + 8192))
    assert work.floor(roofline.H200) == pytest.approx(work.bytes / 4.8e12)
    assert work.bound(roofline.H200) == "memory"
    many = roofline.grouped_gemm(9, 4096, 4096, 7168, "fp8_block")
    assert many.bound(roofline.H200) == "compute"
    assert many.floor(roofline.H200) == pytest.approx(2 * 4096 * weights / 1978.9e12)
    latent = roofline.mla_decode(shapes.DEEPSEEK_V3, 128, 4096)
    assert 128 * 4096 * 576 * 2 < latent.bytes < 1.08 * 128 * 4096 * 576 * 2
    table = list(roofline.lines())
    assert len(table) == 1 + len(list(roofline.all_work()))


@pytest.mark.timeout(900)
def test_representative_cases_compile_into_good_code():
    """For all three chips, without any of them; all cases are compiled by `make aot`."""
    done = subprocess.run(
        [sys.executable, "-m", "moe_runtime.kernels.aot", "--subset"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("TRITON_")},
        capture_output=True,
        text=True,
        timeout=880,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-1].endswith(", 0 with problems")
    rows = [line.split(" | ") for line in lines[1:-1]]
    assert {target.name for target in TARGETS} == {row[0] for row in rows if row[1] == "grouped_gemm"}
    assert {"mla_decode", "mla_prefill", "gqa_decode", "route", "permute"} <= {row[1] for row in rows}
    done = subprocess.run(
        [sys.executable, "-m", "moe_runtime.kernels.aot", "--op", "nothing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "no Triton kernel for nothing" in done.stderr
