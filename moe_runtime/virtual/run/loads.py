"""What a simulation assumes of expert loads: where they come from, how unevenly ranks bear them.

Owns the meaning of `--balance`, and what the report says of balance: it is drawn, as the cost model draws it.
L MoE layers, E experts, R ranks.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moe_runtime.errors import InputError
from moe_runtime.placement.placement import Placement, linear
from moe_runtime.report.balance import over_mean
from moe_runtime.report.records import F64
from moe_runtime.report.schema_time import RankLoads
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.common import LIKE_RECORDED
from moe_runtime.virtual.cost.balance import Balance, Drift, draw_balance, layer_balancedness
from moe_runtime.virtual.cost.loads import deepseek_v3, is_recorded, power_law, with_balancedness

RECORDED, UNIFORM, POWER, TARGET = "recorded", "uniform", "power", "balancedness"
FORMS = f"{RECORDED}, {UNIFORM}, {POWER}:EXPONENT or {TARGET}:X"
CURVE = 64  # batch sizes at which the balancedness of a step is looked up


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """What `--balance` asks for; `value` of a power law or a target."""

    kind: str
    value: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "LoadChoice":
        """InputError for what is none of FORMS."""
        kind, colon, number = text.partition(":")
        if kind in (RECORDED, UNIFORM) and not colon:
            return cls(kind)
        bounds = {POWER: (0.0, 4.0), TARGET: (0.01, 1.0)}.get(kind)
        if bounds is None:
            raise InputError(f"--balance is {text!r}, must be {FORMS}")
        try:
            value = float(number)
        except ValueError:
            value = float("nan")
        if not bounds[0] <= value <= bounds[1]:
            raise InputError(f"--balance is {text!r}, must have a number from {bounds[0]:g} to {bounds[1]:g}")
        return cls(kind, value)

    @classmethod
    def default(cls, model: ModelSpec) -> "LoadChoice":
        """Recorded loads where there are some, else a power law as uneven as those."""
        return cls(RECORDED) if is_recorded(model) else cls(POWER, LIKE_RECORDED)

    def __str__(self) -> str:
        return self.kind if self.kind in (RECORDED, UNIFORM) else f"{self.kind}:{self.value:g}"


def expert_loads(choice: LoadChoice, model: ModelSpec, *, role: str, ranks: int, seed: int) -> F64:
    """float64 [L, E] with shared experts that are served as slots, each of which every token goes to.

    InputError where there are no recorded loads.
    """
    layers, experts = model.num_moe_layers, model.moe.num_experts
    if choice.kind == RECORDED:
        if not is_recorded(model):
            raise InputError(
                f"--balance is {RECORDED}, but only loads of DeepSeek-V3 (58 MoE layers of 256 experts) are"
                f" recorded; this model has {layers} of {experts}: {UNIFORM}, {POWER}:EXPONENT or {TARGET}:X"
            )
        load_LE = deepseek_v3("decode" if role == "decode" else "prefill")
    elif choice.kind == TARGET:
        load_LE = with_balancedness(layers, experts, ranks, choice.value, seed)
    else:
        load_LE = power_law(layers, experts, choice.value, seed)
    return with_shared(load_LE, model)


def with_shared(load_LE: F64, model: ModelSpec) -> F64:
    """Loads of the routed experts, and of the shared ones that are served as slots."""
    shared = model.moe.slot_experts - model.moe.num_experts
    if not shared:
        return load_LE
    tokens_L1 = load_LE.sum(axis=1, keepdims=True) / model.moe.router.top_k
    return np.concatenate([load_LE, np.repeat(tokens_L1, shared, axis=1)], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What balance follows from; all instances of a deployment are alike.

    top_k                experts, shared ones in slots included, of a token
    ranks_per_node       of an instance
    tokens_per_sequence  that one sequence has in a step
    tokens_of_sequence   and in all its steps together
    """

    load_LE: F64
    placement: Placement
    redundant_experts: int
    moe_layers: tuple[int, ...]
    top_k: int
    ranks_per_node: int
    drift: Drift
    tokens_per_sequence: float
    tokens_of_sequence: float = 1.0
    seed: int = 0


class DeploymentLoads:
    """How unevenly the ranks of an instance are loaded, drawn once for all steps, when first asked for."""

    def __init__(self, assumed: Assumed) -> None:
        self.assumed = assumed

    @cached_property
    def balance(self) -> Balance:
        """Spreads by the size of a step."""
        a = self.assumed
        return draw_balance(
            a.load_LE,
            a.placement,
            top_k=a.top_k,
            drift=a.drift,
            tokens_per_sequence=a.tokens_per_sequence,
            ranks_per_node=a.ranks_per_node,
            seed=a.seed,
        )

    def step_balancedness(self, tokens_N: F64) -> F64:
        """float64 [N]: mean over layers, of micro-batches of so many tokens of all ranks; NaN without any."""
        found = np.full(len(tokens_N), np.nan)
        some = tokens_N > 0
        if some.any():
            known = np.geomspace(1.0, max(2.0, float(tokens_N.max())), CURVE)
            values = [self.balance.balancedness(tokens) for tokens in known]
            found[some] = np.interp(np.log(np.maximum(tokens_N[some], 1.0)), np.log(known), values)
        return found

    def layers(self, tokens: float, draws: int) -> F64:
        """float64 [draws, L]: balancedness of every MoE layer in micro-batches of `tokens`."""
        a = self.assumed
        return layer_balancedness(
            a.load_LE,
            a.placement,
            top_k=a.top_k,
            drift=a.drift,
            tokens=tokens,
            tokens_per_sequence=a.tokens_per_sequence,
            draws=draws,
            seed=a.seed,
        )

    @property
    def load_LR(self) -> F64:
        """float64 [L, R]: long-run load of every rank, in the unit of the experts'."""
        return self.assumed.placement.rank_load(self.assumed.load_LE)

    def rank_loads(self, instance: str) -> RankLoads:
        """Before: experts in order, the first ones with replicas."""
        a = self.assumed
        in_order = linear(
            num_layers=len(a.load_LE),
            num_experts=a.load_LE.shape[1],
            num_ranks=a.placement.num_ranks,
            redundant_experts=a.redundant_experts,
        )
        before, after = (over_mean(p.rank_load(a.load_LE)) for p in (in_order, a.placement))
        return RankLoads(instance=instance, before=before, after=after)
