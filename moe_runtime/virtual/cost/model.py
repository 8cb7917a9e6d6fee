"""CostModel: seconds of a step of one instance, by part and by what bounds it.

Owns how kernels, transfers and imbalance make a layer, and layers a step. Ranks step together: what a rank
computes before its rows leave is waited for by all, and so are the rows of the heaviest rank's experts.
The same shape costs the same; what is kept between calls only saves time. Knows no scheduler and no clock.
"""

from dataclasses import replace

from moe_runtime.spec.limits import DispatchMode
from moe_runtime.spec.model import ModelSpec
from moe_runtime.virtual.cost.account import Account
from moe_runtime.virtual.cost.balance import EVEN_BALANCE, Balance
from moe_runtime.virtual.cost.batch import Batch
from moe_runtime.virtual.cost.constants import Constants, constants
from moe_runtime.virtual.cost.deployment import Setting
from moe_runtime.virtual.cost.lanes import Layer, Stages, collective, plain, two_way
from moe_runtime.virtual.cost.links import make_links
from moe_runtime.virtual.cost.roofline import Roofline
from moe_runtime.virtual.cost.rows import LayerKernels
from moe_runtime.virtual.cost.shapes import StepCost, StepShape
from moe_runtime.virtual.cost.spread import Load, Loads
from moe_runtime.virtual.cost.tables import RowTables
from moe_runtime.virtual.cost.work import Rates, Work

KEPT = 4096  # loads kept between calls


class CostModel:
    """Step times of one instance of `model` as `setting` describes it.

    balance  how unevenly experts are loaded; `EVEN_BALANCE`: not at all
    Raises InputError for a machine, library or size that cannot be.
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
        machine = known.machine(setting.machine)
        self.links = make_links(model, setting, machine, known)
        rates = Rates(hardware=machine.hardware, kernels=known.kernels, fitted=known.fitted)
        kernels = LayerKernels(
            model=model,
            precision=setting.precision,
            rates=rates,
            slice_of=setting.tensor_parallel,
            expert_slice_of=setting.ranks if setting.experts == "tensor_parallel" else 1,
        )
        taken = known.libraries[setting.library or machine.library].normal.multiprocessors
        beside = replace(kernels, rates=rates.with_available(1 - taken / machine.multiprocessors))
        self._tables = {False: RowTables(kernels), True: RowTables(beside)}
        self._loads = Loads(model, setting, self.links)
        self._roofline = Roofline(model, setting, machine.hardware)
        self._kept: dict[tuple[DispatchMode, int, int, float, int], tuple[Load, ...]] = {}
        self._heads: dict[int, Work] = {}

    def step(self, shape: StepShape) -> StepCost:
        """Seconds of one step; one without any rows costs what its kernels' starts do."""
        split = shape.micro_batches
        tables = self._tables[split == 2 and shape.mode == "normal"]
        batch, account = Batch(shape, tables), Account()
        self._moe_layers(account, batch, tables, shape)
        dense = float(split * (self.model.num_layers - self.model.num_moe_layers))
        if dense:
            parts = tables.at(batch.most)
            batch.account(account, dense)
            account.work("dense", parts.mlp_dense, dense)
            account.work("other", parts.mlp_other.plus(parts.finish), dense)
            account.collective(sum(self._reduces(batch)), dense)
        sampled = shape.decode_sequences_R * shape.queries + (shape.prefill_tokens_R > 0)
        account.work("dense", self._head(int(sampled.max())), 1.0)
        return account.cost(self._roofline.seconds(shape))

    def _moe_layers(self, account: Account, batch: Batch, tables: RowTables, shape: StepShape) -> None:
        loads, split = self._load(batch, tables, shape), shape.micro_batches
        after = tables.at(batch.most)
        shared = float(after.shared_dense.seconds + after.shared_other.seconds)
        finish, reduces = float(after.finish.seconds), self._reduces(batch)
        layers = self.model.num_moe_layers / len(loads)
        for load in loads:
            out, back = float(load.sending.seconds) / 2, float(load.receiving.seconds) / 2
            stages = Stages(
                first=batch.first,
                second=batch.slowest - batch.first + reduces[0] + out,
                shared=shared,
                experts=float(load.even.seconds) + out + back,
                finish=finish + reduces[1] + back,
                dispatch=load.transfers[0],
                combine=load.transfers[1],
                heaviest=load.hot + out + back,
            )
            layer = self._layer(stages, shape)
            out, back = (transfer.seconds for transfer in load.transfers)
            own = split * sum(stages.compute) + layer.exposed_dispatch + layer.exposed_combine
            account.wait(layer.seconds - own, layers)
            account.transfer("dispatch", layer.exposed_dispatch, out, load.balanced[0], layers)
            account.transfer("combine", layer.exposed_combine, back, load.balanced[1], layers)
            account.busy(layer.busy, layers)
        times, any_load = float(self.model.num_moe_layers * split), loads[0]
        batch.account(account, times)
        account.work("dense", after.shared_dense, times)
        account.work("other", after.shared_other.plus(after.finish), times)
        account.work("experts", any_load.even, times)
        account.work("dispatch", any_load.sending, times)
        account.work("combine", any_load.receiving, times)
        account.collective(sum(reduces), times)

    def _layer(self, stages: Stages, shape: StepShape) -> Layer:
        if shape.micro_batches == 1:
            return plain(stages)
        if shape.mode == "low_latency":
            return two_way(stages)
        return collective(stages, self.links.normal_start * shape.rounds, self.links.beside)

    def _load(self, batch: Batch, tables: RowTables, shape: StepShape) -> tuple[Load, ...]:
        """Loads of the spreads of a micro-batch: they change only when its rows do."""
        key = (shape.mode, shape.micro_batches, shape.rounds, batch.total, batch.most)
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            spreads = self.balance.spreads(batch.total)
            found = self._kept[key] = self._loads.of(
                tables.kernels,
                shape.mode,
                spreads,
                total=batch.total,
                most=batch.most,
                background=shape.micro_batches == 2,
                rounds=shape.rounds,
            )
        return found

    def _reduces(self, batch: Batch) -> tuple[float, float]:
        """All-reduce after attention, and after the experts where they are sliced too."""
        one = self.links.all_reduce(float(batch.most * self.model.hidden * 2))
        return one, one if self.setting.experts == "tensor_parallel" else 0.0

    def _head(self, rows: int) -> Work:
        found = self._heads.get(rows)
        if found is None:
            found = self._heads[rows] = self._tables[False].kernels.head(float(rows))
        return found
