"""Runs cases through a backend inside a rank process and says what was wrong."""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import Buffer, MaskedRows, Rows
from moe_runtime.expert_parallel.collective import CollectiveBuffer
from moe_runtime.expert_parallel.local import LocalBuffer
from moe_runtime.expert_parallel.masked import MaskedBuffer
from moe_runtime.expert_parallel.payload import Payload
from moe_runtime.expert_parallel.shm import ShmBuffer, ShmSizes
from moe_runtime.expert_parallel.where import StepAndLayer
from tests.expert_parallel.cases import Case, Inputs, dense, expert_factors, inputs, run_experts
from tests.expert_parallel.world import Rank

Make = Callable[[Case, Rank, str], Buffer]


def sizes_of(case: Case) -> ShmSizes:
    return ShmSizes(
        num_ranks=case.num_ranks,
        slots_per_rank=case.placement.slots_per_rank,
        hidden=case.hidden,
        top_k=case.top_k,
        max_tokens=case.round_tokens,
        payload=Payload(case.payload or case.dtype),
        output_dtype=case.torch_dtype,
    )


def make_shm(case: Case, rank: Rank, name: str, *, timeout: float = 60.0) -> ShmBuffer:
    """A connected buffer; `name` is where ranks meet."""
    buffer = ShmBuffer(sizes_of(case), rank=rank.rank, timeout=timeout)
    buffer.connect(rank.share_window(name, buffer.create_window), where=StepAndLayer(step=1, layer=2))
    return buffer


def make_torch(case: Case, rank: Rank, name: str) -> CollectiveBuffer:
    return CollectiveBuffer(
        slots_per_rank=case.placement.slots_per_rank,
        payload=Payload(case.payload) if case.payload else None,
    )


def make_local(case: Case, rank: Rank, name: str) -> LocalBuffer:
    return LocalBuffer(
        slots_per_rank=case.placement.slots_per_rank,
        payload=Payload(case.payload) if case.payload else None,
    )


def run_cases(rank: Rank, make: Make, cases: list[Case]) -> list[str]:
    """COLLECTIVE: every case, one after the other; a line per thing that is wrong."""
    if make is make_torch:
        rank.join_gloo()
    wrong = []
    for number, case in enumerate(cases):
        try:
            buffer = make(case, rank, f"case{number}")
            if case.layout == "masked":
                buffer = MaskedBuffer(buffer, capacity=case.num_ranks * case.round_tokens)
            problems = check_case(buffer, case, rank.rank)
        except ValueError as error:
            problems = [] if case.refusal and case.refusal in str(error) else [repr(error)]
        else:
            problems += ["not refused"] if case.refusal else []
        wrong += [f"{case}, rank {rank.rank}: {p}" for p in problems]
    return wrong


def check_case(buffer: Buffer, case: Case, rank: int) -> list[str]:
    """COLLECTIVE: all rounds of a case against the dense reference."""
    sent = inputs(case, rank)
    out_TH = torch.full_like(sent.x_TH, torch.nan)
    problems = []
    for number, part in enumerate(case.parts(rank)):
        handle = buffer.dispatch(sent.x_TH[part], sent.slot_ids_TK[part], sent.weights_TK[part])
        rows = handle.wait()
        problems += rows_problems(case, rows, len(sent.x_TH[part])) + order_problems(case, rows, rank, number)
        out_TH[part] = buffer.combine(run_experts(case, rows, rank), rows).wait()
    return problems + output_problems(case, sent, out_TH)


def rows_problems(case: Case, rows: Rows, num_sent: int) -> list[str]:
    """Shapes, dtypes and the hint that the contract promises a rank that has sent so many rows."""
    s, H = case.placement.slots_per_rank, case.hidden
    wire = Payload(case.payload or case.dtype)
    shape: tuple[int, ...] = (int(rows.counts.sum()), H)
    starts = rows.counts.cumsum(0) - rows.counts
    if isinstance(rows, MaskedRows):
        capacity = case.num_ranks * case.round_tokens
        shape, starts = (s, capacity, H), torch.arange(s) * capacity
    if isinstance(rows, MaskedRows) != (case.layout == "masked"):
        return [f"{type(rows).__name__} from a buffer of layout {case.layout}"]
    found = (tuple(rows.x.shape), rows.x.dtype, rows.counts.dtype, tuple(rows.counts.shape), rows.weights)
    wanted = (shape, wire.torch_dtype, torch.int32, (s,), None)
    problems = [] if found == wanted else [f"rows are {found}, not {wanted}"]
    if not torch.equal(rows.starts.long(), starts.long()):
        problems.append(f"starts {rows.starts.tolist()}")
    if isinstance(rows, MaskedRows):
        hint = -(-num_sent * case.top_k // s) if num_sent else None
        if rows.rows_per_slot != hint:
            problems.append(f"{rows.rows_per_slot} rows per slot, not {hint}")
    scales = None if rows.scales is None else (tuple(rows.scales.shape), rows.scales.dtype)
    if scales != (((*shape[:-1], H // 128), torch.float32) if wire.scaled else None):
        problems.append(f"scales are {scales}")
    return problems


def order_problems(case: Case, rows: Rows, rank: int, round_number: int) -> list[str]:
    """Rows stand as they travelled, in order (slot, source rank, token)."""
    wire = Payload(case.payload or case.dtype)
    s, expected = case.placement.slots_per_rank, []
    sources = []
    for source in range(case.num_ranks):
        sent, part = inputs(case, source), list(case.parts(source))[round_number]
        sources.append((wire.encode(sent.x_TH[part])[0].float(), sent.slot_ids_TK[part]))
    for slot in range(rank * s, (rank + 1) * s):
        expected += [values_TH[(slots_TK == slot).any(1)] for values_TH, slots_TK in sources]
    found = rows.x.float()
    if isinstance(rows, MaskedRows):
        found = found[torch.arange(found.shape[1])[None] < rows.counts[:, None]]
    return [] if torch.equal(found, torch.cat(expected)) else ["rows are not in order (slot, source, token)"]


def output_problems(case: Case, sent: Inputs, out_TH: Tensor) -> list[str]:
    """Bit for bit the sum in top-k order of what experts make of the rows as they travelled; and within
    the stated bounds of what they would make of the rows themselves."""
    wire = Payload(case.payload or case.dtype)
    values, scales = wire.encode(sent.x_TH)
    travelled_TH = values.float()
    if scales is not None:
        travelled_TH *= scales.repeat_interleave(128, dim=1)
    expected_TH = dense(case, sent, travelled_TH).to(case.torch_dtype)
    problems = []
    if not torch.equal(out_TH, expected_TH):
        different = (out_TH != expected_TH).any(1).nonzero().flatten().tolist()
        problems.append(f"{len(different)} of {len(out_TH)} rows differ, first {different[:5]}")
    exact_TH = dense(case, sent, sent.x_TH.float())
    error_TH = (out_TH.float() - exact_TH).abs() - bound(case, sent, scales)
    if len(error_TH) and not error_TH.max() <= 0:
        problems.append(f"beyond the bound by {error_TH.max():.3g}")
    return problems


def bound(case: Case, sent: Inputs, scales_TB: Tensor | None) -> Tensor:
    """[T, H]: how far a result may be from experts of exact rows, whose outputs are rounded too.

    A value errs by half a step of its format: 2**-8 of itself in bf16, 2**-4 in e4m3 (or scale / 1024
    below its normal numbers); the experts scale that, their outputs and the result are rounded in turn.
    """
    x_TH = sent.x_TH.float()
    row_TH = torch.zeros_like(x_TH)
    if scales_TB is not None:
        row_TH = torch.maximum(x_TH.abs() / 16, scales_TB.repeat_interleave(128, dim=1) / 1024)
    elif case.payload == "bfloat16":
        row_TH = x_TH.abs() / 256
    step = 2.0**-8 if case.dtype == "bfloat16" else 2.0**-22
    a_S, b_S = expert_factors(case)
    total_TH, size_TH = torch.zeros_like(x_TH), torch.zeros_like(x_TH)
    for k in range(case.top_k):
        slot_T = sent.slot_ids_TK[:, k]
        weight_T1 = torch.where(slot_T >= 0, sent.weights_TK[:, k], 0.0)[:, None]
        a_T1 = torch.nan_to_num(a_S[slot_T])
        y_TH = (x_TH.abs() + row_TH) * a_T1 + b_S[slot_T].abs()
        total_TH += weight_T1 * (row_TH * a_T1 + 2 * y_TH * step)
        size_TH += weight_T1 * y_TH
    return total_TH + size_TH * step + 1e-6
