"""What a client wanted beside the tokens, of samples or of its prompt, read from the device at commit."""

from dataclasses import dataclass

import numpy as np

from moe_runtime.engine.device_step import Samples
from moe_runtime.engine.messages import Logprobs, PromptLogprobs
from moe_runtime.scheduler.sampling import SamplingInputs
from moe_runtime.scheduler.sequences import Scores, Sequence, State
from moe_runtime.scheduler.step import Scheduled


@dataclass(frozen=True, slots=True)
class Extras:
    """`logits`: float32 bytes of the vocabulary."""

    logits: bytes | None = None
    logprobs: Logprobs | None = None


NOTHING = Extras()


def extras_of(inputs: SamplingInputs, samples: Samples) -> dict[int, Extras]:
    """Extras of the samples that have any, by their index in the step."""
    logits: dict[int, bytes] = {}
    if samples.logits_WV is not None:
        wanted = np.flatnonzero(inputs.want_logits_N).tolist()
        rows_WV = samples.logits_WV.float().cpu().numpy()
        logits = {n: row_V.tobytes() for n, row_V in zip(wanted, rows_WV, strict=True)}
    logprobs: dict[int, Logprobs] = {}
    if (found := samples.logprobs) is not None:
        wanted = np.flatnonzero(inputs.num_logprobs_N >= 0).tolist()
        rows = zip(found.chosen_W.tolist(), found.top_ids_WK.tolist(), found.top_WK.tolist(), strict=True)
        for n, (chosen, ids, values) in zip(wanted, rows, strict=True):
            count = int(inputs.num_logprobs_N[n])
            logprobs[n] = Logprobs(chosen, ids[:count], values[:count])
    return {n: Extras(logits.get(n), logprobs.get(n)) for n in sorted(logits.keys() | logprobs.keys())}


def keep_scores(scheduled: Scheduled, samples: Samples) -> None:
    """Give the sequences of a step what it says of their prompts; those that ended need nothing."""
    found = samples.scores
    if found is None:
        return
    chosen_S = found.chosen_W.cpu().numpy()
    top_ids_SK, top_SK = found.top_ids_WK.cpu().numpy(), found.top_WK.cpu().numpy()
    start = 0
    for sequence, count in scheduled.scored:
        rows, best = slice(start, start + count), slice(sequence.request.sampling.prompt_logprobs)
        start += count
        if sequence.state is not State.FINISHED:
            ids_SK = top_ids_SK[rows, best].astype(np.int32)
            sequence.scores.append(Scores(chosen_S[rows], ids_SK, top_SK[rows, best].copy()))


def take_prompt_logprobs(sequence: Sequence) -> PromptLogprobs | None:
    """All scores of a sequence whose prompt is through, once; None if they were not asked for."""
    if sequence.request.sampling.prompt_logprobs < 0:
        return None
    scores, sequence.scores = sequence.scores, []
    return PromptLogprobs(
        scores[0].top_SK.shape[1] if scores else 0,
        b"".join(s.chosen_S.tobytes() for s in scores),
        b"".join(s.top_ids_SK.tobytes() for s in scores),
        b"".join(s.top_SK.tobytes() for s in scores),
    )
