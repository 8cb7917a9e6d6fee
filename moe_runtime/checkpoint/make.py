"""make_checkpoint: a real Hugging Face checkpoint with random weights, the same for the same seed.

Owns the files of a checkpoint and their atomic appearance; dimensions are in `shapes`, values in
`random_weights`. Tensor names and shapes come from the families, so writer and reader cannot differ.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from moe_runtime.checkpoint import shapes
from moe_runtime.checkpoint.corpus import sentences
from moe_runtime.checkpoint.random_weights import random_tensor
from moe_runtime.errors import InputError
from moe_runtime.models.families import registry
from moe_runtime.spec.model import DTYPE_BYTES
from moe_runtime.spec.weights import TensorTarget

SHARD_BYTES = {"tiny": 192 << 10, "small": 96 << 20}
_SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
# The plainest there is: the weights have learnt no other.
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# (words, vocabulary) of the text the tokenizer is trained on
_CORPUS = {"tiny": (4000, 600), "small": (200_000, 12_000)}


def make_checkpoint(out: Path, *, family: str, size: str, dtype: str = "float32", seed: int = 0) -> None:
    """Write config, tokenizer and sharded safetensors into the new directory `out`.

    Same arguments, same bytes. `out` appears complete or not at all. Raises InputError for an
    unknown family, size or dtype, a negative seed, and for an `out` that exists and is not an
    empty directory.
    """
    _require("family", family, shapes.FAMILIES)
    _require("size", size, shapes.SIZES)
    _require("dtype", dtype, tuple(DTYPE_BYTES))
    if seed < 0:
        raise InputError(f"seed = {seed} must be 0 or more")
    try:
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise InputError(f"{out}: exists and is not an empty directory; nothing was written")
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".", suffix=".partial", dir=out.parent))
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from error
    try:
        _write(partial, shapes.config(family, size, dtype), size, getattr(torch, dtype), seed)
        partial.chmod(0o755)
        os.replace(partial, out)
    except (OSError, SafetensorError) as error:  # a full disk, say
        raise InputError(f"{out}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _require(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(f"{field} = {value!r} must be one of {', '.join(allowed)}")


def _write(folder: Path, config: dict[str, Any], size: str, dtype: torch.dtype, seed: int) -> None:
    _write_json(folder / "config.json", config)
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    spec = registry.spec_from_config(config, path=folder / "config.json")
    shards = list(_shards(registry.tensor_targets(spec), dtype.itemsize, SHARD_BYTES[size]))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {t.source: _tensor(t, dtype, seed) for t in shard}
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # save_file leaves it readable by its owner only
        weight_map.update(dict.fromkeys(tensors, name))
    total = sum(_nbytes(t, dtype.itemsize) for shard in shards for t in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)
    _write_tokenizer(folder, size, config["vocab_size"], config["max_position_embeddings"])


def _tensor(target: TensorTarget, dtype: torch.dtype, seed: int) -> Tensor:
    values = random_tensor(target.source, target.shape, seed=seed)
    return values if target.fp32 else values.to(dtype)


def _nbytes(target: TensorTarget, itemsize: int) -> int:
    count = 1
    for n in target.shape:
        count *= n
    return count * (4 if target.fp32 else itemsize)


def _shards(targets: tuple[TensorTarget, ...], itemsize: int, limit: int) -> Iterator[list[TensorTarget]]:
    shard: list[TensorTarget] = []
    size = 0
    for target in targets:
        nbytes = _nbytes(target, itemsize)
        if shard and size + nbytes > limit:
            yield shard
            shard, size = [], 0
        shard.append(target)
        size += nbytes
    yield shard


def _write_tokenizer(folder: Path, size: str, vocab_size: int, max_positions: int) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words, vocabulary = _CORPUS[size]
    tokenizer.train_from_iterator(sentences(words=words, vocabulary=vocabulary), trainer)
    missing = vocab_size - tokenizer.get_vocab_size()
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(missing)])  # so that every id has a text
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    bos, eos, pad = _SPECIAL_TOKENS
    special = {"bos_token": bos, "eos_token": eos, "pad_token": pad}
    _write_json(folder / "special_tokens_map.json", special)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_positions,
            "clean_up_tokenization_spaces": False,
            **special,
        },
    )
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
