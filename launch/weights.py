"""A rank's weights: a decoder that is built, filled from a checkpoint and packed; another for a reload."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from moe_runtime.checkpoint.load import LoadReport, load_rank
from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.models.decoder import Decoder
from moe_runtime.placement.placement import Placement
from moe_runtime.spec.weights import TensorTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReader:
    """`build` gives decoders of this rank, all alike and without values; `targets` fill them."""

    build: Callable[[], Decoder]
    targets: Sequence[TensorTarget]
    rank: int

    def read(self, path: Path, placement: Placement) -> tuple[Decoder, LoadReport]:
        """A decoder with the weights of a checkpoint, ready to run. Raises CheckpointError."""
        decoder = self.build()
        with Checkpoint.open(path) as checkpoint:
            report = load_rank(
                checkpoint,
                self.targets,
                decoder.tensors(),
                lambda layer: placement.local_experts(layer, self.rank),
            )
        decoder.prepare()
        return decoder, report

    def reread(self, path: Path, placement: Placement) -> Mapping[str, Tensor]:
        """Only the weights, by parameter, laid out as those of a decoder that runs."""
        return self.read(path, placement)[0].tensors()
