"""A rank's weights: a decoder that is built, filled from a checkpoint and packed; another for a reload."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moe_runtime.checkpoint.load import LoadReport, load_rank
from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.errors import UserError
from moe_runtime.kernels.errors import KernelError
from moe_runtime.models.decoder import Decoder
from moe_runtime.placement.placement import Placement
from moe_runtime.spec.weights import TensorTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReader:
    """`build` gives decoders of this rank, all alike and without values; `targets` fill them.

    `skipped` as in `Checkpoint.validate`.
    """

    build: Callable[[], Decoder]
    targets: Sequence[TensorTarget]
    skipped: Callable[[str], bool]
    rank: int

    def read(self, path: Path, placement: Placement) -> tuple[Decoder, LoadReport]:
        """A decoder with the weights of a checkpoint, ready to run.

        Raises CheckpointError, and UserError where the kernels of the plan cannot run.
        """
        with Checkpoint.open(path) as checkpoint:
            return self._filled(checkpoint, placement)

    def reread(self, path: Path, placement: Placement, wanted: Callable[[], bool]) -> Mapping[str, Tensor]:
        """Only the weights, by parameter, laid out as those of a decoder that runs.

        What is read is checked: files may have been replaced since the frontend looked at them. Raises
        CheckpointError, also once the weights are not `wanted` any more.
        """
        with Checkpoint.open(path) as checkpoint:
            checkpoint.validate(self.targets, self.skipped)
            return self._filled(checkpoint, placement, wanted)[0].tensors()

    def _filled(
        self, checkpoint: Checkpoint, placement: Placement, wanted: Callable[[], bool] = lambda: True
    ) -> tuple[Decoder, LoadReport]:
        try:
            decoder = self.build()
        except KernelError as error:  # a chip without kernels, or a library that the plan asks for
            raise UserError(f"the plan's kernels cannot run here: {error}") from error
        report = load_rank(
            checkpoint,
            self.targets,
            decoder.tensors(),
            lambda layer: placement.local_experts(layer, self.rank),
            wanted,
        )
        decoder.prepare()
        return decoder, report
