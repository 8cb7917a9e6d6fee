"""Evaluate: an option out of a choice: whether it fits, its step, how many requests a second it serves.

Owns the steady state of one instance with full batches. Decode: every group has its sequences at the mean
context. Prefill: every group a full chunk, of prompts as long as the workload's. Unified: groups have chunks
by chance, as many on average as sequences end.
"""

import math
from dataclasses import replace

import numpy as np

from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.from_plan import plan_setting
from moe_runtime.virtual.cost.model import CostModel
from moe_runtime.virtual.cost.shapes import StepCost, StepShape
from moe_runtime.virtual.search.option import Choice, Option, bare
from moe_runtime.virtual.search.query import Query
from moe_runtime.virtual.search.room import BLOCK_TOKENS, Room, room
from moe_runtime.virtual.search.skew import Skews
from moe_runtime.virtual.search.space import replaced_tokens

SIGMAS = 2.0
"""Standard deviations above the mean for which a rank's cache has room."""


class Evaluator:
    """Options of one query; cost models are kept per instance."""

    def __init__(self, query: Query) -> None:
        self.query = query
        self._skews = Skews(
            query.model,
            query.known.fitted,
            ranks_per_node=query.ranks_per_node,
            balanced=query.balanced,
        )
        self._models: dict[Choice, CostModel] = {}

    @property
    def recorded(self) -> bool:
        """Whether expert loads are the model's own."""
        return self._skews.recorded

    def option(self, choice: Choice) -> Option | str:
        """The option of a choice, or why there is none."""
        found = room(self.query, choice, self._kv_tokens(choice))
        if isinstance(found, str):
            return found
        cost = self._cost(choice, found)
        return self._option(choice, found, cost)

    def _kv_tokens(self, choice: Choice) -> float:
        """Tokens a group's cache must hold: its sequences', or in prefill two steps' whole prompts."""
        work = self.query.workload
        if choice.phase == "prefill":
            prompts = max(1.0, choice.chunk / work.computed)
            return 2 * prompts * (work.input + BLOCK_TOKENS / 2)
        n = choice.sequences
        return n * (work.context + BLOCK_TOKENS / 2) + SIGMAS * math.sqrt(n) * work.spread

    def _cost(self, choice: Choice, found: Room) -> StepCost:
        model = self._model(choice, found)
        if choice.phase == "unified":
            return self._mixed(choice, model)
        cost = model.step(self._shape(choice, choice.chunk, choice.groups))
        if choice.queries > 1:  # a draft layer is one more of the model's layers
            cost = cost.times(1 + self.query.model.mtp_layers / self.query.model.num_layers)
        return cost

    def _mixed(self, choice: Choice, model: CostModel) -> StepCost:
        """Mean of steps without prompts and of those in which some groups have a chunk: all wait for them."""
        has = replaced_tokens(self.query, choice.sequences) / choice.chunk
        nobody = (1 - has) ** choice.groups
        loaded = has * choice.groups / (1 - nobody)
        without, more = model.step(self._shape(choice, 0, 0.0)), math.ceil(loaded)
        some = model.step(self._shape(choice, choice.chunk, more))
        if more > 1 and more > loaded:
            fewer = model.step(self._shape(choice, choice.chunk, more - 1))
            some = some.times(loaded - more + 1).plus(fewer.times(more - loaded))
        return some.times(1 - nobody).plus(without.times(nobody))

    def _shape(self, choice: Choice, tokens: int, loaded: float) -> StepShape:
        """A step in which `loaded` groups have `tokens` prompt tokens each.

        They are of prompts as long as the workload's are: the groups of a step wait for the longest.
        """
        work, groups = self.query.workload, choice.groups
        one, number = np.ones(groups), np.arange(groups)
        chunk_R = np.where(number < loaded, float(tokens), 0.0)
        count = len(work.lengths)
        at_R = np.minimum((number + 0.5) / max(1, math.ceil(loaded)) * count, count - 1).astype(np.int64)
        own_R = work.computed * np.asarray(work.lengths)[at_R]
        # A prompt of several chunks finds its earlier ones cached: half of them on average.
        prefix_R = max(tokens / work.computed, 1.0) * work.cached + np.maximum(0.0, (own_R - tokens) / 2)
        rows = choice.sequences * choice.queries + tokens
        return StepShape(
            decode_sequences_R=one * choice.sequences,
            decode_context_R=one * (choice.sequences * work.context),
            prefill_tokens_R=chunk_R,
            prefill_pairs_R=chunk_R * (work.cached + (own_R + 1) / 2),
            prefill_prefix_R=np.where(chunk_R > 0, prefix_R, 0.0),
            queries=choice.queries,
            mode="low_latency" if choice.phase == "decode" else "normal",
            micro_batches=choice.micro_batches,
            rounds=math.ceil(rows / (choice.group * choice.micro_batches * choice.max_tokens)),
        )

    def _model(self, choice: Choice, found: Room) -> CostModel:
        key = replace(bare(choice), micro_batches=1, queries=1)
        if key not in self._models:
            self._models[key] = CostModel(
                self.query.model,
                self._setting(choice, found),
                self._skews.of(
                    "prefill" if choice.phase == "prefill" else "decode",
                    1 if choice.whole else choice.ranks,
                    choice.redundant,
                    self.query.workload.computed if choice.phase == "prefill" else 1.0,
                ),
                known=self.query.known,
            )
        return self._models[key]

    def _setting(self, choice: Choice, found: Room) -> Setting:
        weights = self.query.model.weight_dtype(self.query.model.dtype)
        setting = plan_setting(found.cluster, found.deployment, weights=weights)
        if choice.group == 1:
            return setting
        if choice.whole:
            return replace(setting, tensor_parallel=choice.group, experts="tensor_parallel")
        return replace(setting, tensor_parallel=choice.group)

    def _option(self, choice: Choice, found: Room, cost: StepCost) -> Option:
        work, step = self.query.workload, cost.seconds
        if choice.phase == "prefill":
            rate, tpot = choice.groups * choice.chunk / step / work.computed, 0.0
        else:
            accepted = 1.0 if choice.queries == 1 else 1.0 + (work.acceptance or 0.0)
            rate = choice.groups * choice.sequences * accepted / step / work.output
            tpot = step / accepted
        return Option(
            choice=choice,
            rate=rate,
            step=step,
            tpot=tpot,
            chunks=math.ceil(work.computed / choice.chunk) if choice.chunk else 0,
            cost=cost,
            budget=found.budget,
            blocks=found.blocks,
        )
