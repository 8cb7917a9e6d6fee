"""One decode step on one GPU, three ways: eager, two micro-batches on two streams, and those in a CUDA graph.

Scheduler, inputs, their cut in two and the order of stages are the engine's; all experts are local,
so what overlaps is computation with computation. Checked: the two micro-batches' hidden states against
the eager step's (they are batched differently, so within `--tolerance` of the largest value, and the same
greedy tokens but where two logits lie closer than that), and the graph's replay against them bit for bit.

Prints a JSON line with milliseconds per step. Exit code 0: equal; 1: different, or no graph could be
captured; 2: no CUDA GPU.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from moe_runtime.checkpoint.load import load_rank  # noqa: E402
from moe_runtime.checkpoint.make import make_checkpoint  # noqa: E402
from moe_runtime.checkpoint.reader import Checkpoint  # noqa: E402
from moe_runtime.engine import device_step, overlap, split  # noqa: E402
from moe_runtime.engine.agree import StepDecision, StepKind  # noqa: E402
from moe_runtime.engine.device_step import NO_SAMPLES  # noqa: E402
from moe_runtime.expert_parallel.local import LocalBuffer  # noqa: E402
from moe_runtime.expert_parallel.slot_table import SlotTable  # noqa: E402
from moe_runtime.models.context import NoClock, StepContext  # noqa: E402
from moe_runtime.models.decoder import Decoder, build_decoder  # noqa: E402
from moe_runtime.models.families import registry  # noqa: E402
from moe_runtime.placement.placement import linear  # noqa: E402
from moe_runtime.scheduler.scheduler import Scheduler  # noqa: E402
from moe_runtime.scheduler.sequences import make_sequence  # noqa: E402
from moe_runtime.scheduler.step import Scheduled, SchedulerLimits  # noqa: E402
from moe_runtime.spec.requests import Request, SamplingParams  # noqa: E402

BLOCK_TOKENS = 16
PROMPT = 48


def load(folder: Path, device: torch.device) -> Decoder:
    """All experts of a checkpoint on one device, in its own dtype."""
    with Checkpoint.open(folder) as checkpoint:
        spec = registry.read_spec(folder, None)
        placement = linear(
            num_layers=spec.num_moe_layers, num_experts=spec.moe.num_experts, num_ranks=1, redundant_experts=0
        )
        table = SlotTable(placement, source_rank=0, device=device)
        decoder = build_decoder(
            spec,
            slots_per_rank=placement.slots_per_rank,
            buffers={"normal": LocalBuffer(slots_per_rank=placement.slots_per_rank, device=device)},
            slot_tables=[table.layer(i) for i in range(spec.num_moe_layers)],
            dtype=getattr(torch, spec.dtype),
            device=device,
        )
        load_rank(
            checkpoint,
            registry.tensor_targets(spec),
            decoder.tensors(),
            lambda layer: placement.local_experts(layer, 0),
        )
    decoder.prepare()
    return decoder


class Step:
    """A decode step of `sequences` sequences, prefilled before; it may run any number of times."""

    def __init__(self, decoder: Decoder, sequences: int, device: torch.device) -> None:
        self.decoder = decoder
        spec = decoder.spec
        blocks = sequences * (-(-(PROMPT + 2) // BLOCK_TOKENS) + 1)
        shape = (blocks, BLOCK_TOKENS, spec.attention.kv_entry)
        dtype = decoder.norm.weight.dtype
        self.cache = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(spec.num_layers)]
        scheduler = Scheduler(
            SchedulerLimits(
                max_batch_tokens=sequences * PROMPT,
                max_sequences=sequences,
                chunk_tokens=sequences * PROMPT,
                block_tokens=BLOCK_TOKENS,
                num_blocks=blocks,
                max_positions=spec.max_positions,
                prefix_cache=False,
            )
        )
        rng = np.random.default_rng(0)
        for i in range(sequences):
            prompt = rng.integers(8, spec.vocab_size, PROMPT).tolist()
            request = Request(id=i, prompt=prompt, sampling=SamplingParams(max_tokens=4, ignore_eos=True))
            scheduler.add(make_sequence(request, ()))
        prefill = self._build(scheduler)
        samples = device_step.run(decoder, self._parts(prefill, 1), decode_only=False)
        scheduler.commit(prefill, samples.tokens_N.cpu().numpy().astype(np.int32))
        self.scheduled = self._build(scheduler)

    def contexts(self, micro_batches: int) -> list[StepContext]:
        """Device inputs of the step, whole or in halves."""
        return [context for _, context in self._parts(self.scheduled, micro_batches)]

    def forward(self, contexts: list[StepContext], lanes: overlap.Lanes = overlap.ONE_LANE) -> Tensor:
        """Hidden states [T, H] after all layers."""
        batches = [(self.decoder.embed(context), context) for context in contexts]
        layers = list(self.decoder.layers)
        return torch.cat(overlap.run(batches, layers, order=overlap.DECODE, lanes=lanes))

    @staticmethod
    def _build(scheduler: Scheduler) -> Scheduled:
        scheduler.propose()
        limits = scheduler.limits
        return scheduler.build(limits.max_batch_tokens, limits.chunk_tokens)

    def _parts(self, scheduled: Scheduled, micro_batches: int) -> list:
        whole = scheduled.inputs
        decision = StepDecision(kind=StepKind.FORWARD, rounds=1, round_tokens=whole.num_tokens)
        return [
            (
                part,
                device_step.make_context(
                    part,
                    decision,
                    previous=NO_SAMPLES,
                    kv_cache=self.cache,
                    block_tokens=BLOCK_TOKENS,
                    clock=NoClock(),
                ),
            )
            for part in (split.halves(whole) if micro_batches == 2 else (whole,))
        ]


def capture(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of `run`, which has run before, and the tensor that its replays fill."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return graph, result


def milliseconds(run: Callable[[], object], repetitions: int) -> float:
    """Median time of a call on the device."""
    times = []
    for _ in range(repetitions):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def different(decoder: Decoder, one_TH: Tensor, other_TH: Tensor, tolerance: float) -> list[str]:
    """What is wrong with two hidden states that should be nearly the same."""
    error = float((one_TH.float() - other_TH.float()).abs().max() / one_TH.float().abs().max())
    wrong = [] if error <= tolerance else [f"hidden states differ by {error:.3g} of the largest"]
    one_TV, other_TV = (decoder.logits(x_TH).float() for x_TH in (one_TH, other_TH))
    best_T2 = one_TV.topk(2).values
    sure_T = best_T2[:, 0] - best_T2[:, 1] > 2 * (one_TV - other_TV).abs().amax(1)
    tokens = (one_TV.argmax(1) != other_TV.argmax(1)) & sure_T
    return wrong + ([f"{int(tokens.sum())} tokens differ"] if bool(tokens.any()) else [])


@torch.inference_mode()
def compare(step: Step, repetitions: int, tolerance: float) -> tuple[dict[str, object], list[str]]:
    """Times, and what is wrong."""
    from moe_runtime.engine.two_streams import TwoStreams

    whole, halves, lanes = step.contexts(1), step.contexts(2), TwoStreams()
    eager_TH = step.forward(whole)
    for _ in range(3):  # kernels are compiled and gather plans made before a graph is captured
        streams_TH = step.forward(halves, lanes)
    torch.cuda.synchronize()
    wrong = [f"two streams: {line}" for line in different(step.decoder, eager_TH, streams_TH, tolerance)]
    times: dict[str, object] = {
        "eager_ms": milliseconds(lambda: step.forward(whole), repetitions),
        "two_streams_ms": milliseconds(lambda: step.forward(halves, lanes), repetitions),
    }
    try:
        graph, graph_TH = capture(lambda: step.forward(halves, lanes))
    except RuntimeError as error:
        return times, [*wrong, f"graph capture: {(str(error).splitlines() or [''])[0]}"]
    graph_TH.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    if not torch.equal(graph_TH, streams_TH):
        wrong.append("the graph's replay differs from the step it was captured from")
    times["graph_ms"] = milliseconds(graph.replay, repetitions)
    return times, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--size", choices=("tiny", "small"), default="small")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=0.02, help="of bfloat16's hidden states")
    a = parser.parse_args()
    if not torch.cuda.is_available():
        sys.stderr.write("overlap: needs a CUDA GPU, and torch sees none\n")
        return 2
    device = torch.device("cuda")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "model"
        make_checkpoint(checkpoint, family="deepseek_v3", size=a.size, dtype="bfloat16")
        decoder = load(checkpoint, device)
    with torch.inference_mode():
        step = Step(decoder, a.sequences, device)
    times, wrong = compare(step, a.repetitions, a.tolerance)
    print(
        json.dumps(
            {"device": torch.cuda.get_device_name(), "sequences": a.sequences, **times, "wrong": wrong}
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
