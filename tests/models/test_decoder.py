"""The decoder's logits against transformers' on tiny checkpoints, however the tokens arrive."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moe_runtime.checkpoint.make import make_checkpoint
from moe_runtime.engine import overlap
from moe_runtime.models.decoder import Decoder
from tests.models.decoder_harness import Rank, load_decoder

TOLERANCE = 2e-4  # max abs difference of fp32 logits
FAMILIES = ("deepseek_v3", "qwen3_moe")


class Model:
    """A checkpoint, our decoder of it and transformers' logits."""

    def __init__(self, folder: Path, *, dtype: str = "float32") -> None:
        self.folder = folder
        self.hf = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.decoder: Decoder = load_decoder(folder, dtype=dtype)

    def logits(self, ids: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.hf(torch.tensor([ids])).logits[0].float()
        return logits


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / request.param
    make_checkpoint(folder, family=request.param, size="tiny")
    return Model(folder)


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 512, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    error = (got - want).abs().max()
    assert error <= TOLERANCE  # false for NaN, too


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 128, 129, 300])
def test_prefill(model, length):
    ids = prompt(length, seed=length)
    check(Rank(model.decoder).step(prefill={0: ids}), model.logits(ids))


@pytest.mark.parametrize("chunk", [16, 100])
def test_chunked_prefill(model, chunk):
    ids = prompt(300)
    rank = Rank(model.decoder)
    parts = [rank.step(prefill={0: ids[i : i + chunk]}) for i in range(0, 300, chunk)]
    check(torch.cat(parts), model.logits(ids))


def test_decode_from_the_first_token_on(model):
    ids = prompt(70, seed=1)
    rank = Rank(model.decoder)
    check(torch.cat([rank.step(decode={0: token}) for token in ids]), model.logits(ids))


class Feed:
    """Sequences fed in any order to one rank; every row's logits are compared as they come."""

    def __init__(self, model: Model, ids: dict[int, list[int]], **options: Any) -> None:
        self.rank = Rank(model.decoder, **options)
        self.ids, self.want = ids, {s: model.logits(tokens) for s, tokens in ids.items()}
        self.fed = dict.fromkeys(ids, 0)

    def step(self, *, decode: tuple[int, ...] = (), prefill: dict[int, int] | None = None) -> None:
        counts = dict.fromkeys(decode, 1) | (prefill or {})
        spans = {s: (self.fed[s], self.fed[s] + n) for s, n in counts.items()}
        chunks = {s: self.ids[s][a:b] for s, (a, b) in spans.items()}
        got = self.rank.step(
            decode={s: chunks[s][0] for s in decode}, prefill={s: chunks[s] for s in prefill or {}}
        )
        check(got, torch.cat([self.want[s][a:b] for s, (a, b) in spans.items()]))
        self.fed |= {s: b for s, (_, b) in spans.items()}


def test_mixed_steps(model):
    """Sequences of different lengths decode while others prefill, in blocks that held something else."""
    lengths = [1, 20, 37, 150, 64, 9]
    feed = Feed(model, {s: prompt(n + 8, seed=s) for s, n in enumerate(lengths)})
    feed.rank.step(prefill={99: prompt(200)})
    feed.rank.free(99)
    feed.step(prefill={0: 1, 1: 20, 2: 37})
    feed.step(decode=(0, 1, 2), prefill={3: 75, 4: 3})
    feed.step(decode=(2, 0, 1), prefill={3: 75, 4: 61, 5: 9})
    for _ in range(3):
        feed.step(decode=(0, 1, 2, 3, 4, 5))


def test_many_sequences_of_one_length(model):
    feed = Feed(model, {s: prompt(20, seed=s) for s in range(12)})
    feed.step(prefill=dict.fromkeys(range(12), 16))
    feed.step(decode=tuple(range(12)))


@pytest.mark.parametrize(("rounds", "round_tokens"), [(2, 32), (3, 16), (4, 16)])
def test_dispatch_rounds(model, rounds, round_tokens):
    """Rounds without rows (the last of 4 for 40 rows) take part, too."""
    feed = Feed(model, {0: prompt(41)}, rounds=rounds, round_tokens=round_tokens)
    feed.step(prefill={0: 40})
    feed.step(decode=(0,))


def test_an_idle_rank_takes_part(model):
    rank = Rank(model.decoder)
    assert rank.step().shape == (0, 512)
    assert Rank(model.decoder, rounds=2, round_tokens=8).step().shape == (0, 512)


@pytest.mark.parametrize("beside", ["dispatch", "combine"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_layers_may_be_left_around_their_transfers(model, rounds, beside):
    """Once in attention, three times a round, not at all in dense layers; and phases in order."""
    rank = Rank(model.decoder, rounds=rounds, round_tokens=8)
    step = rank.context({}, {0: prompt(17)})
    step.shared_beside = beside
    phases: list[str] = []
    step.clock = type("Recorder", (), {"enter": lambda self, phase: phases.append(phase)})()
    x_TH = model.decoder.embed(step)
    for index, layer in enumerate(model.decoder.layers):
        phases.clear()
        stages, places = layer(x_TH, step), []
        while True:
            try:
                places.append(next(stages))
            except StopIteration as stop:
                x_TH = stop.value
                break
        moe = index in model.decoder.spec.moe_layers
        assert places == (["attention", *["dispatch", "shared", "combine"] * rounds] if moe else [])
        assert x_TH.shape == (17, 32)
        if moe:
            one_round = ["routing", "dispatch", "experts", "dispatch", "experts", "combine", "combine"]
            first = one_round if beside == "dispatch" else [*one_round[:-1], "experts", "combine"]
            further = one_round * (rounds - 1)
            assert phases == ["attention", "attention", "routing", *first, *further, "other"]


@torch.inference_mode()
def test_batch_invariant_bits_do_not_depend_on_rounds_or_their_order(tmp_path):
    """In what order a row takes its two sums must not depend on how many rows other ranks have."""
    make_checkpoint(tmp_path / "tiny", family="deepseek_v3", size="tiny")
    decoder = load_decoder(tmp_path / "tiny", deterministic=True)

    def hidden(rounds: int, order: overlap.Order) -> Tensor:
        rank = Rank(decoder, rounds=rounds, round_tokens=8)
        step = rank.context({}, {0: prompt(17)})
        return overlap.run([(decoder.embed(step), step)], list(decoder.layers), order=order)[0]

    plain_TH = hidden(1, overlap.DECODE)
    for rounds in (1, 3, 4):
        for order in (overlap.PREFILL, overlap.DECODE):
            assert torch.equal(hidden(rounds, order), plain_TH), (rounds, order.shared_beside)


def test_replicas_change_nothing(model):
    """8 redundant experts: pairs go to different slots, the tokens' sums stay the same."""
    ids = prompt(60)
    replicated = load_decoder(model.folder, redundant_experts=8)
    got = Rank(replicated).step(prefill={0: ids})
    check(got, model.logits(ids))


def test_prepare_changes_the_order_of_bytes_only(model):
    ids = prompt(60)
    plain = load_decoder(model.folder, prepare=False)
    check(Rank(plain).step(prefill={0: ids}), model.logits(ids))
    before = {name: tensor.clone() for name, tensor in plain.tensors().items()}
    plain.prepare()
    packed = plain.tensors()
    assert packed.keys() == before.keys()
    for name, tensor in packed.items():
        assert torch.equal(tensor.flatten().sort().values, before[name].flatten().sort().values)
        if ".experts." in name:
            assert tensor.shape[0] == before[name].shape[0]
            assert torch.equal(tensor[3].flatten().sort().values, before[name][3].flatten().sort().values)
    assert any(tensor.shape != before[name].shape for name, tensor in packed.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family, tmp_path):
    """Rounding to 8 bits everywhere: closeness is judged against how far transformers' bf16 is from fp32."""
    make_checkpoint(tmp_path / "m", family=family, size="tiny", dtype="bfloat16")
    ids = prompt(40)
    exact = Model(tmp_path / "m").logits(ids)
    model = Model(tmp_path / "m", dtype="bfloat16")
    rank = Rank(model.decoder)
    got = torch.cat([rank.step(prefill={0: ids[:33]}), *[rank.step(decode={0: t}) for t in ids[33:]]])
    ours, theirs = (got - exact).abs().mean(), (model.logits(ids) - exact).abs().mean()
    assert ours <= 1.5 * theirs + 0.01


COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
}
MLA = COMMON | {
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
GQA = COMMON | {"num_key_value_heads": 2, "num_experts": 16, "head_dim": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "mla without q_lora": MLA | {"q_lora_rank": None, "norm_topk_prob": False},
    "mla rotating halves": MLA | {"rope_interleave": False, "n_group": 4, "topk_group": 2},
    "mla with another rms_norm_eps": MLA | {"rms_norm_eps": 1e-2},
    "gqa tied, one dense layer": GQA | {"tie_word_embeddings": True, "mlp_only_layers": [1]},
    "gqa without normalised weights": GQA | {"norm_topk_prob": False},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, tmp_path):
    """Configs off the beaten track, saved by transformers itself."""
    fields = VARIANTS[name]
    torch.manual_seed(0)
    if "kv_lora_rank" in fields:
        made: PreTrainedModel = DeepseekV3ForCausalLM(DeepseekV3Config(**fields))
    else:
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields))
    made.save_pretrained(tmp_path / "m")
    feed = Feed(Model(tmp_path / "m"), {0: prompt(50)})
    feed.step(prefill={0: 40})
    for _ in range(3):
        feed.step(decode=(0,))
