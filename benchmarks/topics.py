"""Work whose hot experts change with the topic, for live_rebalance.py, and what its rows cost.

A topic is a set of tokens: prompts are one of them, and a bias on the logits keeps the output to them. They
are chosen so that the checkpoint's own routers send the topics to different experts. The other kind of topic
is a double of the router, which draws experts from measured loads.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from moe_runtime.engine.messages import Submit
from moe_runtime.expert_parallel.buffer import Rows
from moe_runtime.models.moe import Experts, Route, Router
from moe_runtime.spec.model import ModelSpec
from moe_runtime.spec.requests import Request, SamplingParams
from tests.engine.instance import Driven

SPECIAL = 8  # ids below are no words
KEEP = 60.0  # added to the logits of a topic's tokens
TRIES, ROUNDS = 20, 20


@dataclass(frozen=True, kw_only=True)
class Load:
    """Topics in the `order` in which they come, of `steps` steps each, with one row a sequence and step.

    words_PV     token ids of each topic; None: the routers are doubles that draw from
    shares_PLE   the share of each expert
    row_seconds  of each row a rank receives
    sequences    of each rank
    """

    order: tuple[int, ...]
    steps: int
    row_seconds: float
    sequences: int
    words_PV: NDArray[np.int64] | None = None
    shares_PLE: NDArray[np.float64] | None = None

    @property
    def total(self) -> int:
        return self.steps * len(self.order)


class Play:
    """One rank's requests and doubles; from its construction on, rows cost."""

    def __init__(self, driven: Driven, load: Load) -> None:
        self._driven, self._load, self._topic = driven, load, 0
        charge(load.row_seconds)
        if load.shares_PLE is not None:
            self._replace_routers(load.shares_PLE)

    def topics(self) -> Iterator[int]:
        """Submit each topic's requests; the next one's when the caller asks for them."""
        load, driven = self._load, self._driven
        for place, self._topic in enumerate(load.order):
            for number in range(load.sequences):
                driven.tell(Submit(request=self._request(place * load.sequences + number), handoff=False))
            while driven.engine.scheduler.num_requests < load.sequences:
                driven.engine.desk.receive()
            yield place

    def _request(self, number: int) -> Request:
        words, rank = self._load.words_PV, self._driven.rank.rank
        how = SamplingParams(max_tokens=self._load.steps, ignore_eos=True)
        if words is None:
            return Request(id=number, prompt=[SPECIAL], sampling=how)
        seed = number + 100_000 * rank
        mine = words[self._topic].tolist()
        how = SamplingParams(
            max_tokens=self._load.steps,
            ignore_eos=True,
            temperature=1.0,
            seed=seed,
            logit_bias=dict.fromkeys(mine, KEEP),
        )
        return Request(id=number, prompt=[mine[seed % len(mine)]], sampling=how)

    def _replace_routers(self, shares_PLE: NDArray[np.float64]) -> None:
        logs_PLE = torch.from_numpy(np.log(shares_PLE)).float()
        generator = torch.Generator().manual_seed(self._driven.rank.rank)
        routers = [m for m in self._driven.engine.decoder.modules() if isinstance(m, Router)]
        layer_of = {id(router): layer for layer, router in enumerate(routers)}
        play = self

        def route(router: Router, h_TH: torch.Tensor) -> Route:
            scores = logs_PLE[play._topic, layer_of[id(router)]].expand(len(h_TH), -1)
            noise = -torch.log(
                -torch.log(torch.rand(scores.shape, generator=generator).clamp(1e-9, 1 - 1e-7))
            )
            top_k = router._how["top_k"]
            ids = (scores + noise).topk(top_k).indices  # draws without replacement
            return Route(ids, torch.full(ids.shape, 1 / top_k))

        setattr(Router, "forward", route)  # noqa: B010


def charge(row_seconds: float) -> None:
    """Experts of this process take so long for each row from now on: the policy measures it as their cost."""
    compute = Experts.forward

    def charged(experts: Experts, rows: Rows) -> torch.Tensor:
        until = time.monotonic() + int(rows.counts.sum()) * row_seconds
        y = compute(experts, rows)
        time.sleep(max(0.0, until - time.monotonic()))
        return y

    setattr(Experts, "forward", charged)  # noqa: B010


def folded(path: Path, spec: ModelSpec, topics: int) -> NDArray[np.float64]:
    """float64 [topics, L, E]: of each layer's sorted loads every n-th, shuffled for each topic."""
    loads_LE = np.loadtxt(path, delimiter=",", comments="#")
    rng, experts = np.random.default_rng(0), spec.moe.num_experts
    rows = np.sort(loads_LE[:: max(1, len(loads_LE) // spec.num_moe_layers)][: spec.num_moe_layers], axis=1)
    step = rows.shape[1] / experts
    kept = rows[:, (np.arange(experts) * step + step - 1).astype(int)]
    kept /= kept.sum(axis=1, keepdims=True)
    return np.stack([np.stack([rng.permutation(row) for row in kept]) for _ in range(topics)])


def vocabularies(checkpoint: Path, spec: ModelSpec, topics: int, size: int = 24) -> NDArray[np.int64]:
    """int64 [topics, size]: tokens that the routers tell apart, as far as embeddings say.

    Tokens are grouped by the experts that all layers' routers would choose for their embeddings (k-means on
    sets of experts, the best of some tries); of each group the tokens that are nearest to it and to no other.
    """
    hot_VX = _chosen(checkpoint, spec)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(TRIES):
        near_VP = _grouped(hot_VX, topics, rng)
        lead_VP = near_VP - np.stack([np.delete(near_VP, p, 1).max(axis=1) for p in range(topics)], axis=1)
        words_PV = np.argsort(-lead_VP, axis=0)[:size].T
        mean_PX = hot_VX[words_PV].mean(axis=1)
        apart = np.abs(mean_PX[:, None] - mean_PX[None]).sum()
        found.append((float(apart), words_PV + SPECIAL))
    return max(found, key=lambda pair: pair[0])[1]


def _grouped(hot_VX: NDArray[np.float64], groups: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """float64 [V, groups]: how near each token is to each group's mean."""
    mean_PX = hot_VX[rng.choice(len(hot_VX), groups, replace=False)]
    for _ in range(ROUNDS):
        group_V = (hot_VX @ mean_PX.T - (mean_PX**2).sum(axis=1) / 2).argmax(axis=1)
        parts = [hot_VX[group_V == p] for p in range(groups)]
        mean_PX = np.stack([x.mean(axis=0) if len(x) else mean_PX[p] for p, x in enumerate(parts)])
    near_VP: NDArray[np.float64] = hot_VX @ mean_PX.T
    return near_VP


def _chosen(checkpoint: Path, spec: ModelSpec) -> NDArray[np.float64]:
    """float64 [words, layers x experts]: 1 where a layer's router chooses the expert for an embedding."""
    tensors = {n: v for f in sorted(checkpoint.glob("*.safetensors")) for n, v in load_file(f).items()}
    h_VH = next(v for n, v in tensors.items() if "embed_tokens" in n)[SPECIAL:]
    gates = [tensors[f"model.layers.{layer}.mlp.gate.weight"] for layer in spec.moe_layers]
    scores_VLE = np.stack([h_VH @ gate_EH.T for gate_EH in gates], axis=1)
    top_VLK = np.argsort(-scores_VLE, axis=2)[:, :, : spec.moe.router.top_k]
    hot_VLE = np.zeros(scores_VLE.shape)
    np.put_along_axis(hot_VLE, top_VLK, 1.0, axis=2)
    return hot_VLE.reshape(len(h_VH), -1)
