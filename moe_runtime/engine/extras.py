"""What a client wanted beside the token of a sample, read from the device at commit."""

from dataclasses import dataclass

import numpy as np

from moe_runtime.engine.device_step import Samples
from moe_runtime.engine.messages import Logprobs
from moe_runtime.scheduler.sampling import SamplingInputs


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
