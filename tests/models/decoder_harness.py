"""A decoder on one rank with a paged cache of scattered blocks, driven step by step without an engine."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from moe_runtime.checkpoint.load import load_rank
from moe_runtime.checkpoint.reader import Checkpoint
from moe_runtime.engine import overlap
from moe_runtime.expert_parallel.buffer import Buffers
from moe_runtime.expert_parallel.local import LocalBuffer
from moe_runtime.expert_parallel.slot_table import SlotTable
from moe_runtime.models.context import NoClock, PrefillSegment, StepContext
from moe_runtime.models.decoder import Decoder, build_decoder
from moe_runtime.models.families import registry
from moe_runtime.placement.placement import linear
from moe_runtime.spec.limits import DispatchMode
from moe_runtime.spec.model import ModelSpec, serve_shared_in_slots

CPU = torch.device("cpu")


def load_decoder(
    folder: Path,
    *,
    dtype: str = "float32",
    redundant_experts: int = 0,
    shared_slots: bool = False,
    rank: int = 0,
    num_ranks: int = 1,
    buffers: Buffers | None = None,
    prepare: bool = True,
    deterministic: bool = False,
) -> Decoder:
    """One rank's decoder of a checkpoint: all experts on one rank, or its share of them."""
    with Checkpoint.open(folder) as checkpoint:
        spec = registry.read_spec(folder, dtype)
        spec = serve_shared_in_slots(spec) if shared_slots else spec
        placement = linear(
            num_layers=spec.num_moe_layers,
            num_experts=spec.moe.slot_experts,
            num_ranks=num_ranks,
            redundant_experts=redundant_experts,
        )
        table = SlotTable(placement, source_rank=rank, device=CPU)
        decoder = build_decoder(
            spec,
            slots_per_rank=placement.slots_per_rank,
            buffers=buffers or {"normal": LocalBuffer(slots_per_rank=placement.slots_per_rank)},
            slot_tables=[table.layer(i) for i in range(spec.num_moe_layers)],
            dtype=getattr(torch, dtype),
            device=CPU,
            deterministic=deterministic,
        )
        targets = registry.tensor_targets(spec)
        load_rank(checkpoint, targets, decoder.tensors(), lambda layer: placement.local_experts(layer, rank))
    if prepare:
        decoder.prepare()
    return decoder


@dataclass
class Rank:
    """Sequences of one rank. Unwritten cache rows are NaN, so that reading one shows."""

    decoder: Decoder
    blocks: int = 96
    block_tokens: int = 16
    rounds: int = 1
    round_tokens: int = 0
    mode: DispatchMode = "normal"
    cached: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec: ModelSpec = self.decoder.spec
        shape = (self.blocks, self.block_tokens, spec.attention.kv_entry)
        dtype = self.decoder.norm.weight.dtype
        self.cache = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(spec.num_layers)]
        self._free = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(7)).tolist()

    def free(self, sequence: int) -> None:
        """Give a sequence's blocks back, poisoned."""
        for block in self.tables.pop(sequence):
            for cache in self.cache:
                cache[block] = torch.nan
            self._free.append(block)
        del self.cached[sequence]

    def _extend(self, sequence: int, count: int) -> tuple[list[int], list[int]]:
        """Positions and cache rows of the next `count` tokens; allocates blocks."""
        first = self.cached.get(sequence, 0)
        table = self.tables.setdefault(sequence, [])
        while len(table) * self.block_tokens < first + count:
            table.append(self._free.pop())
        self.cached[sequence] = first + count
        positions = list(range(first, first + count))
        return positions, [
            table[p // self.block_tokens] * self.block_tokens + p % self.block_tokens for p in positions
        ]

    def context(self, decode: dict[int, int], prefill: dict[int, list[int]]) -> StepContext:
        """The step that feeds one token to each sequence of `decode` and a chunk to each of `prefill`."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        segments = []
        for sequence, token in decode.items():
            p, s = self._extend(sequence, 1)
            tokens, positions, slots = [*tokens, token], positions + p, slots + s
        for sequence, chunk in prefill.items():
            before, start = self.cached.get(sequence, 0), len(tokens)
            p, s = self._extend(sequence, len(chunk))
            tokens, positions, slots = tokens + chunk, positions + p, slots + s
            blocks = torch.tensor(self.tables[sequence])
            segments.append(PrefillSegment(start=start, stop=len(tokens), context=before, blocks=blocks))
        contexts = [self.cached[s] for s in decode]
        width = max((len(self.tables[s]) for s in decode), default=0)
        tables = [self.tables[s] + [0] * (width - len(self.tables[s])) for s in decode]
        return StepContext(
            token_ids_T=torch.tensor(tokens, dtype=torch.int64),
            positions_T=torch.tensor(positions, dtype=torch.int64),
            kv_slots_T=torch.tensor(slots, dtype=torch.int64),
            num_decode=len(decode),
            decode_blocks_DB=torch.tensor(tables, dtype=torch.int64).view(len(decode), width),
            decode_context_D=torch.tensor(contexts, dtype=torch.int64),
            max_context=max(contexts, default=0),
            segments=tuple(segments),
            kv_cache=self.cache,
            clock=NoClock(),
            rounds=self.rounds,
            round_tokens=self.round_tokens,
            dispatch_mode=self.mode,
        )

    def step(
        self, decode: dict[int, int] | None = None, prefill: dict[int, list[int]] | None = None
    ) -> Tensor:
        """Logits fp32 [T, V] of all rows: the decode rows, then the prefill rows."""
        step = self.context(decode or {}, prefill or {})
        with torch.inference_mode():
            (x_TH,) = overlap.run([(self.decoder.embed(step), step)], list(self.decoder.layers))
            return self.decoder.logits(x_TH)
