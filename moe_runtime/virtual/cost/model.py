"""CostModel: seconds of a step of one instance, by part and by what bounds it.

Owns how kernels, transfers and imbalance make a layer, and layers a step. Ranks step together: what a rank
computes before its rows leave is waited for by all, and every layer takes as long as its heaviest rank.
Pure: the same shape costs the same. Knows no scheduler and no time.
"""

from dataclasses import replace

import numpy as np

from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cost.account import Account
from moe_runtime.virtual.cost.balance import EVEN_BALANCE, Balance
from moe_runtime.virtual.cost.constants import Constants, constants
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.lanes import DECODE, PREFILL, Stages, overlapped, plain
from moe_runtime.virtual.cost.links import EVEN, Spread, make_links
from moe_runtime.virtual.cost.rows import LayerKernels
from moe_runtime.virtual.cost.shapes import StepCost, StepShape
from moe_runtime.virtual.cost.tables import RowTables
from moe_runtime.virtual.cost.work import Rates, Work


class CostModel:
    """Step times of one instance of `model` as `setting` describes it.

    balance  how unevenly experts are loaded; `EVEN_BALANCE`: not at all
    """

    def __init__(
        self,
        model: ModelSpec,
        setting: Setting,
        balance: Balance = EVEN_BALANCE,
        *,
        known: Constants | None = None,
    ) -> None:
        known = constants() if known is None else known
        self.model, self.setting, self.balance = model, setting, balance
        machine = known.machines[setting.machine]
        self.links = make_links(model, setting, machine, known)
        self.fitted = known.fitted
        whole = setting.experts == "tensor_parallel"
        rates = Rates(hardware=machine.hardware, kernels=known.kernels, fitted=known.fitted)
        kernels = LayerKernels(
            model=model,
            precision=setting.precision,
            rates=rates,
            slice_of=setting.tensor_parallel,
            expert_slice_of=setting.ranks if whole else 1,
        )
        taken = known.libraries[setting.library or machine.library].normal.multiprocessors
        beside = replace(kernels, rates=rates.with_available(1 - taken / machine.multiprocessors))
        self._tables = {False: RowTables(kernels), True: RowTables(beside)}

    def step(self, shape: StepShape) -> StepCost:
        """Seconds of one step. Empty steps cost what their kernels' starts do."""
        parts = shape.micro_batches
        beside = parts == 2 and shape.mode == "normal"
        batch = _Batch(self, shape, self._tables[beside])
        account = Account()
        moe_layers = self.model.num_moe_layers
        spreads = self.balance.spreads(batch.total)
        for spread in spreads:
            self._moe_layer(account, batch, shape, spread, moe_layers / len(spreads))
        self._dense_layers(account, batch, parts)
        samples = float((shape.decode_sequences_R * shape.queries + (shape.prefill_tokens_R > 0)).max())
        account.work("dense", self._tables[False].kernels.head(samples), 1.0)
        account.host(self.fitted.step)
        return account.cost()

    def _moe_layer(
        self, account: "Account", batch: "_Batch", shape: StepShape, spread: Spread, layers: float
    ) -> None:
        """Add `layers` MoE layers of this spread."""
        setting, parts = self.setting, shape.micro_batches
        kernels = batch.tables.kernels
        masked = shape.mode == "low_latency"
        mean, slots = batch.total / setting.ranks, float(setting.slots_per_rank)
        if setting.experts == "tensor_parallel":
            mean, slots = batch.total, float(self.model.moe.slot_experts)
        rows = mean * self.model.moe.slots_per_token
        even = kernels.experts(rows, slots, masked=masked).plus(kernels.stream_experts(rows, masked=masked))
        hot = rows * spread.rows
        real = kernels.experts(hot, slots, masked=masked).plus(kernels.stream_experts(hot, masked=masked))
        sending = receiving = Work()
        if masked and parts == 2 and setting.experts == "expert_parallel" and setting.ranks > 1:
            sending, receiving = batch.copies()
        transfers, balanced = self._transfers(batch, shape, spread)
        reduce = batch.all_reduce
        stages = Stages(
            first=batch.first,
            second=batch.second + reduce + sending.seconds / 2,
            shared=batch.shared.seconds,
            experts=real.seconds + (sending.seconds + receiving.seconds) / 2,
            finish=batch.finish.seconds + receiving.seconds / 2 + batch.second_reduce,
            dispatch=transfers[0],
            combine=transfers[1],
        )
        order = PREFILL if shape.mode == "normal" else DECODE
        layer = plain(stages) if parts == 1 else overlapped(stages, order)
        times = layers * parts
        batch.account_before(account, times)
        account.work("dense", batch.shared_dense, times)
        account.work("other", batch.shared_other, times)
        account.work("other", batch.finish, times)
        account.work("dispatch", sending, times)
        account.work("combine", receiving, times)
        account.experts(even, real, times)
        account.collective(reduce + batch.second_reduce, times)
        account.transfer("dispatch", layer.exposed_dispatch, transfers[0], balanced[0], layers)
        account.transfer("combine", layer.exposed_combine, transfers[1], balanced[1], layers)
        account.busy(sum(transfers) + reduce + batch.second_reduce, times)

    def _transfers(
        self, batch: "_Batch", shape: StepShape, spread: Spread
    ) -> tuple[tuple[float, float], tuple[float, float]]:
        """(dispatch, combine) seconds of one micro-batch, and the same if every rank had the mean."""
        mean = batch.total / self.setting.ranks
        busiest = batch.most / self.setting.tensor_parallel
        real = [self.links.transfer(shape.mode, d, busiest, mean, spread) for d in (0, 1)]
        even = [self.links.transfer(shape.mode, d, mean, mean, EVEN) for d in (0, 1)]
        return (real[0], real[1]), (even[0], even[1])

    def _dense_layers(self, account: "Account", batch: "_Batch", parts: int) -> None:
        """The layers without experts: every rank computes its own MLP."""
        times = float(parts * (self.model.num_layers - self.model.num_moe_layers))
        if not times:
            return
        kernels, width = batch.tables.kernels, self.model.dense_intermediate
        batch.account_before(account, times)
        account.work("dense", kernels.mlp(batch.most, width), times)
        account.work("other", kernels.stream_mlp(batch.most, width), times)
        account.work("other", kernels.stream_finish(batch.most), times)
        reduces = batch.all_reduce + batch.second_reduce
        account.collective(reduces, times)
        account.busy(reduces, times)


class _Batch:
    """One micro-batch of a step: the rank that is last to send its rows, and what it computes."""

    def __init__(self, model: CostModel, shape: StepShape, tables: RowTables) -> None:
        self.tables, kernels, parts = tables, tables.kernels, shape.micro_batches
        rows_R = np.ceil(shape.tokens_R / parts).astype(np.int64)
        decode_R = np.ceil(shape.decode_sequences_R * shape.queries / parts).astype(np.int64)
        self.most = int(rows_R.max())
        tables.need(self.most)
        self.total = float(shape.tokens_R.sum()) / parts
        core = kernels.decode_core(1.0, shape.queries)
        before_R = tables.before_N[rows_R] + tables.absorb_N[decode_R]
        before_R = before_R + float(core.seconds) * shape.decode_context_R / parts
        prefill = bool(shape.prefill_tokens_R.any())
        if prefill:
            expanded_R = (shape.prefill_tokens_R + shape.prefill_prefix_R) / parts
            core_R = kernels.prefill_core(shape.prefill_pairs_R, shape.prefill_tokens_R).seconds / parts
            before_R = before_R + core_R + tables.expand(expanded_R)
        worst = int(before_R.argmax())
        self.slowest, self.mean = float(before_R[worst]), float(before_R.mean())
        rows = float(rows_R[worst])
        self.core = core.times(float(shape.decode_context_R[worst]) / parts)
        self.project = kernels.project(rows)
        self.output = kernels.output(rows)
        if decode_R[worst]:
            self.project = self.project.plus(kernels.absorb(float(decode_R[worst])))
        self.extra = Work()
        if prefill and shape.prefill_tokens_R[worst] + shape.prefill_prefix_R[worst] > 0:
            expanded = float(shape.prefill_tokens_R[worst] + shape.prefill_prefix_R[worst]) / parts
            self.project = self.project.plus(kernels.expand(expanded))
            self.extra = kernels.assemble(expanded)
            pairs, tokens = float(shape.prefill_pairs_R[worst]), float(shape.prefill_tokens_R[worst])
            self.core = self.core.plus(kernels.prefill_core(pairs / parts, tokens / parts))
        self.router = kernels.router(rows)
        self.stream_first, self.stream_second = kernels.stream_first(rows), kernels.stream_second(rows)
        self.first = float(self.project.plus(self.stream_first, self.extra).seconds)
        self.second = self.slowest - self.first
        most, shared = float(self.most), model.model.moe.shared_intermediate
        self.shared_dense = kernels.mlp(most, shared) if shared else Work()
        self.shared_other = kernels.stream_mlp(most, shared) if shared else Work()
        self.shared = self.shared_dense.plus(self.shared_other)
        self.finish = kernels.stream_finish(most)
        size = most * model.model.hidden * 2
        self.all_reduce = model.links.all_reduce(size)
        self.second_reduce = self.all_reduce if model.setting.experts == "tensor_parallel" else 0.0
        self._sent = most * model.model.moe.slots_per_token
        self._received = self.total / model.setting.ranks * model.model.moe.slots_per_token

    def copies(self) -> tuple[Work, Work]:
        """Low-latency send and receive kernels of a dispatch and of a combine."""
        return self.tables.kernels.copies(self._sent, self._received)

    def account_before(self, account: "Account", times: float) -> None:
        """What a mean rank computes before its rows leave, and what it waits for the slowest one."""
        ratio = self.mean / self.slowest
        times_mean = times * ratio
        account.work("dense", self.project.plus(self.output), times_mean)
        account.work("attention", self.core, times_mean)
        account.work("router", self.router, times_mean)
        account.work("other", self.stream_first.plus(self.stream_second, self.extra), times_mean)
        account.wait(self.slowest - self.mean, times)
