"""SamplingInputs: how a step's samples are drawn, as numpy arrays; and what of it depends on history.

Knows no logits and no device. N samples, A logit edits, M samples under a mask, V vocabulary,
W = ceil(V / 32) words of a mask.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from moe_runtime.scheduler.sequences import Sequence

I32 = NDArray[np.int32]
F32 = NDArray[np.float32]
FORBIDDEN = np.float32(-np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edits:
    """Changes of single logits. Each (sample, token) occurs at most once.

    sample   int32 [A], ascending
    token    int32 [A]
    divide   float32 [A]; a positive logit is divided by it, a negative one multiplied
    add      float32 [A]; then added; -inf forbids
    """

    sample: I32
    token: I32
    divide: F32
    add: F32


NO_EDITS = Edits(
    sample=np.zeros(0, np.int32),
    token=np.zeros(0, np.int32),
    divide=np.zeros(0, np.float32),
    add=np.zeros(0, np.float32),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Samples whose token is one of a set: `sample` int32 [M], ascending; `words` int32 [M, W]."""

    sample: I32
    words: I32


NO_MASKS = Masks(sample=np.zeros(0, np.int32), words=np.zeros((0, 0), np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingInputs:
    """Parameters of N samples.

    temperature_N       float32; 0 is greedy
    seed_N              int64; sampling noise is a function of (seed, output_position)
    output_position_N   int32; 0 for the first generated token of a request
    top_p_N, min_p_N    float32; 1.0 and 0.0 are off
    top_k_N             int32; 0 is off
    num_logprobs_N      int32; -1: no logprobs
    want_logits_N       bool; return the row's logits
    edits               changes of single logits
    masks               sets that tokens must be from
    """

    temperature_N: F32
    seed_N: NDArray[np.int64]
    output_position_N: I32
    top_p_N: F32
    top_k_N: I32
    min_p_N: F32
    num_logprobs_N: I32
    want_logits_N: NDArray[np.bool_]
    edits: Edits = NO_EDITS
    masks: Masks = NO_MASKS

    def cut(self, part: slice) -> "SamplingInputs":
        """Samples [part.start, part.stop) as inputs of their own."""
        edited = slice(*np.searchsorted(self.edits.sample, (part.start, part.stop)).tolist())
        masked = slice(*np.searchsorted(self.masks.sample, (part.start, part.stop)).tolist())
        edits, masks = self.edits, self.masks
        return SamplingInputs(
            temperature_N=self.temperature_N[part],
            seed_N=self.seed_N[part],
            output_position_N=self.output_position_N[part],
            top_p_N=self.top_p_N[part],
            top_k_N=self.top_k_N[part],
            min_p_N=self.min_p_N[part],
            num_logprobs_N=self.num_logprobs_N[part],
            want_logits_N=self.want_logits_N[part],
            edits=Edits(
                sample=edits.sample[edited] - np.int32(part.start),
                token=edits.token[edited],
                divide=edits.divide[edited],
                add=edits.add[edited],
            ),
            masks=Masks(sample=masks.sample[masked] - np.int32(part.start), words=masks.words[masked]),
        )


def greedy(count: int) -> SamplingInputs:
    """`count` greedy samples of which nothing else is wanted."""
    return SamplingInputs(
        temperature_N=np.zeros(count, np.float32),
        seed_N=np.zeros(count, np.int64),
        output_position_N=np.zeros(count, np.int32),
        top_p_N=np.ones(count, np.float32),
        top_k_N=np.zeros(count, np.int32),
        min_p_N=np.zeros(count, np.float32),
        num_logprobs_N=np.full(count, -1, np.int32),
        want_logits_N=np.zeros(count, bool),
    )


def with_history(inputs: SamplingInputs, sequences: Many[Sequence]) -> SamplingInputs:
    """`inputs` with the edits and masks of its samples, sample n being of `sequences[n]`."""
    edits = [(n, *_edits(s)) for n, s in enumerate(sequences) if s.edited]
    masks = [(n, s.constraint.mask()) for n, s in enumerate(sequences) if s.constraint is not None]
    if not edits and not masks:
        return inputs
    return replace(
        inputs,
        edits=Edits(
            sample=np.repeat([n for n, *_ in edits], [len(t) for _, t, _, _ in edits]).astype(np.int32),
            token=np.concatenate([NO_EDITS.token, *(token for _, token, _, _ in edits)]),
            divide=np.concatenate([NO_EDITS.divide, *(divide for *_, divide, _ in edits)]),
            add=np.concatenate([NO_EDITS.add, *(add for *_, add in edits)]),
        ),
        masks=Masks(
            sample=np.array([n for n, _ in masks], np.int32),
            words=np.stack([words for _, words in masks]) if masks else NO_MASKS.words,
        ),
    )


def _edits(sequence: Sequence) -> tuple[I32, F32, F32]:
    """(token ids, divide, add) of a sequence's next sample.

    Penalties as OpenAI defines them (presence, frequency: over the output) and as CTRL (arXiv
    1909.05858, section 4.1) does (repetition: over prompt and output).
    """
    params = sequence.request.sampling
    seen = sequence.tokens[: sequence.num_known]
    output, counts = np.unique(seen[sequence.prompt_len :], return_counts=True)
    repeated = np.unique(seen) if params.repetition_penalty != 1.0 else NO_EDITS.token
    early = sequence.num_tokens - sequence.prompt_len < params.min_tokens
    stops = np.array(sorted(sequence.stop_tokens) if early else [], np.int32)
    biased = np.array(list(params.logit_bias), np.int32)

    token = np.unique(np.concatenate((output, repeated, stops, biased))).astype(np.int32)
    divide, add = np.ones(len(token), np.float32), np.zeros(len(token), np.float32)
    divide[np.searchsorted(token, repeated)] = params.repetition_penalty
    add[np.searchsorted(token, output)] -= params.presence_penalty + params.frequency_penalty * counts
    add[np.searchsorted(token, biased)] += np.array(list(params.logit_bias.values()), np.float32)
    add[np.searchsorted(token, stops)] = FORBIDDEN
    return token, divide, add
