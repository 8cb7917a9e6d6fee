"""Cases of dispatch and combine, and the one generator of their grids. Inputs follow from a case and a
rank alone, so that every rank can work out what it must get.

Test experts work row by row, value by value, without matrix products: y = x * a[expert] + b[expert] with
a product and a sum in fp32. So outputs do not depend on which rows stand beside each other.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moe_runtime.expert_parallel.buffer import Rows
from moe_runtime.placement.placement import Placement, linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`tokens` per rank. `routing`: uniform, one (every pair to slot 0 first), holes (some pairs are -1).

    `rounds`: dispatches that the rows are cut into. `payload` None is the dtype of the rows.
    """

    tokens: tuple[int, ...]
    hidden: int = 64
    top_k: int = 4
    experts: int = 8
    redundant: int = 0
    routing: str = "uniform"
    dtype: str = "float32"
    payload: str | None = None
    layout: str = "grouped"
    rounds: int = 1
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @property
    def round_tokens(self) -> int:
        """Rows of a rank and round: what buffers are built for."""
        return max(1, -(-max(self.tokens) // self.rounds))

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def placement(self) -> Placement:
        return linear(
            num_layers=1,
            num_experts=self.experts,
            num_ranks=self.num_ranks,
            redundant_experts=self.redundant,
        )

    @property
    def refusal(self) -> str | None:
        """What a refusal of this case must say; None if it has to work."""
        return "multiple of 128" if self.payload == "float8_e4m3" and self.hidden % 128 else None

    def parts(self, rank: int) -> Iterator[slice]:
        """The rows of each round; empty where this rank has none left."""
        for i in range(self.rounds):
            yield slice(
                min(self.tokens[rank], i * self.round_tokens),
                min(self.tokens[rank], (i + 1) * self.round_tokens),
            )


@dataclass(frozen=True, slots=True)
class Inputs:
    """x [T, H], slot ids int64 [T, K], weights fp32 [T, K] of one rank."""

    x_TH: Tensor
    slot_ids_TK: Tensor
    weights_TK: Tensor


def inputs(case: Case, rank: int) -> Inputs:
    """A rank's rows and where they go: K different used slots for each."""
    rng = np.random.default_rng([case.seed, rank])
    T, K = case.tokens[rank], case.top_k
    used = np.flatnonzero(case.placement.slot_to_expert_LS[0] >= 0)
    order_TS = rng.random((T, len(used)))
    if case.routing == "one":
        order_TS[:, 0] = -1.0
    slots_TK = used[np.argsort(order_TS, axis=1)[:, :K]].astype(np.int64)
    if case.routing == "holes":
        slots_TK[rng.random((T, K)) < 0.4] = -1
    x_TH = rng.standard_normal((T, case.hidden), dtype=np.float32)
    weights_TK = rng.random((T, K), dtype=np.float32)
    return Inputs(
        torch.from_numpy(x_TH).to(case.torch_dtype), torch.from_numpy(slots_TK), torch.from_numpy(weights_TK)
    )


def expert_factors(case: Case) -> tuple[Tensor, Tensor]:
    """a, b fp32 [S + 1, 1] by slot: of the slot's expert; NaN for empty slots and for -1 (last)."""
    expert_S = torch.from_numpy(case.placement.slot_to_expert_LS[0].astype(np.float32))
    expert_S = torch.cat([expert_S, torch.tensor([-1.0])])
    a_S = torch.where(expert_S < 0, torch.nan, 0.37 + expert_S * 0.113)
    return a_S[:, None], (expert_S * 0.71 - 3.0)[:, None]


def run_experts(case: Case, rows: Rows, rank: int) -> Tensor:
    """What the experts of a rank make of received rows; NaN where there is no valid row."""
    s = case.placement.slots_per_rank
    a_S, b_S = expert_factors(case)
    x = rows.values(torch.float32)
    flat_NH = x.reshape(-1, x.shape[-1])
    y_NH = torch.full(flat_NH.shape, torch.nan)
    for slot, (start, count) in enumerate(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)):
        part = slice(start, start + count)
        y_NH[part] = flat_NH[part] * a_S[rank * s + slot] + b_S[rank * s + slot]
    return y_NH.view(x.shape).to(case.torch_dtype)


def dense(case: Case, sent: Inputs, x_TH: Tensor) -> Tensor:
    """fp32 [T, H]: sum over k in order of weight * expert(x), outputs rounded to the case's dtype.

    `x_TH` fp32 are the rows as the experts see them.
    """
    a_S, b_S = expert_factors(case)
    total_TH = torch.zeros_like(x_TH)
    for k in range(case.top_k):
        slot_T = sent.slot_ids_TK[:, k]
        y_TH = (x_TH * a_S[slot_T] + b_S[slot_T]).to(case.torch_dtype).float()
        term_TH = y_TH * sent.weights_TK[:, k : k + 1]
        total_TH += torch.where(slot_T[:, None] >= 0, term_TH, 0.0)
    return total_TH


def pairwise(factors: Mapping[str, Sequence[object]]) -> Iterator[dict[str, object]]:
    """Combinations in which every pair of values of two factors occurs; greedy, deterministic."""
    names = list(factors)
    index = {name: range(len(factors[name])) for name in names}
    missing = {(a, i, b, j) for a, b in itertools.combinations(names, 2) for i in index[a] for j in index[b]}
    while missing:
        a, i, b, j = min(missing)
        row = {a: i, b: j}
        for name in names:
            if name not in row:
                row[name] = max(index[name], key=lambda v: (_gain(names, row, name, v, missing), -v))  # noqa: B023
        missing -= {(p, row[p], q, row[q]) for p, q in itertools.combinations(names, 2)}
        yield {name: factors[name][row[name]] for name in names}


def _gain(
    names: list[str], row: dict[str, int], name: str, value: int, missing: set[tuple[str, int, str, int]]
) -> int:
    pairs = ((p, q) for p, q in itertools.combinations(names, 2) if name in (p, q))
    filled = {**row, name: value}
    return sum((p, filled[p], q, filled[q]) in missing for p, q in pairs if p in filled and q in filled)


FACTORS: dict[str, Sequence[object]] = {
    "ranks": (1, 2, 3, 4, 5, 6, 7, 8),
    "counts": ("equal", "ragged", "one_rank", "none"),
    "hidden": (64, 96, 128, 1000, 1536, 7168),
    "top_k": (1, 2, 4, 8, 11),
    "experts": (11, 16, 37),
    "redundant": (0, 3),
    "routing": ("uniform", "one", "holes"),
    "values": (
        ("float32", None),
        ("float32", "bfloat16"),
        ("float32", "float8_e4m3"),
        ("bfloat16", None),
        ("bfloat16", "float8_e4m3"),
    ),
    "layout": ("grouped", "masked"),
    "rounds": (1, 3),
}


def pairwise_cases() -> dict[int, list[Case]]:
    """Rank count -> cases, from the pairwise combinations of FACTORS that can exist."""
    found: dict[int, list[Case]] = {}
    for seed, row in enumerate(pairwise(FACTORS)):
        ranks, top_k = int(str(row["ranks"])), int(str(row["top_k"]))
        rows = 5 if row["hidden"] == 7168 else 23
        tokens = {
            "equal": (rows,) * ranks,
            "ragged": tuple((7 * r + 3) % (rows + 1) for r in range(ranks)),
            "one_rank": (0,) * (ranks - 1) + (rows,),
            "none": (0,) * ranks,
        }[str(row["counts"])]
        values: tuple[str, str | None] = row["values"]  # type: ignore[assignment]
        case = Case(tokens=tokens, seed=seed, top_k=top_k, dtype=values[0], payload=values[1])
        plain = {k: row[k] for k in ("hidden", "experts", "redundant", "routing", "layout", "rounds")}
        # One rank has no room for replicas.
        plain["redundant"] = 0 if ranks == 1 else plain["redundant"]
        found.setdefault(ranks, []).append(replace(case, **plain))  # type: ignore[arg-type]
    return found
