"""Which family a checkpoint belongs to, and the three questions one asks of a family.

Owns the table of families. No torch: the parent process validates plans and checkpoints with it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from moe_runtime.errors import CheckpointError
from moe_runtime.models.families import common, deepseek_v3, qwen3_moe
from moe_runtime.models.families.fields import ConfigFields, read_json_object
from moe_runtime.spec.model import ModelSpec
from moe_runtime.spec.weights import TensorTarget


class Family(Protocol):
    """What a family module offers."""

    NAME: str
    ARCHITECTURES: tuple[str, ...]
    MODEL_TYPES: tuple[str, ...]

    def spec_from_config(
        self, fields: ConfigFields, *, dtype: str | None, eos_token_ids: tuple[int, ...]
    ) -> ModelSpec: ...

    def tensor_targets(self, spec: ModelSpec) -> Iterator[TensorTarget]: ...


FAMILIES: Mapping[str, Family] = {m.NAME: cast(Family, m) for m in (deepseek_v3, qwen3_moe)}


def read_spec(checkpoint_dir: Path, dtype: str | None = None) -> ModelSpec:
    """The spec of a checkpoint. `dtype` beats the dtype of its config.json.

    Raises CheckpointError naming the file and the field, or the known families.
    """
    generation = checkpoint_dir / "generation_config.json"
    return spec_from_config(
        read_json_object(checkpoint_dir / "config.json"),
        path=checkpoint_dir / "config.json",
        dtype=dtype,
        generation_config=read_json_object(generation) if generation.exists() else None,
    )


def spec_from_config(
    config: Mapping[str, Any],
    *,
    path: Path,
    dtype: str | None = None,
    generation_config: Mapping[str, Any] | None = None,
) -> ModelSpec:
    """The spec of a config that has been read; `path` is what errors name."""
    family = _family_of(config, path)
    fields = ConfigFields(path, config, family=family.NAME)
    vocab_size = fields.integer("vocab_size")
    source = fields
    if generation_config is not None and generation_config.get("eos_token_id") is not None:
        source = ConfigFields(path.with_name("generation_config.json"), generation_config)
    eos = source.integers("eos_token_id")
    if any(token >= vocab_size for token in eos):
        raise source.error("eos_token_id", f"= {list(eos)} lies outside the vocabulary of {vocab_size}")
    return family.spec_from_config(fields, dtype=dtype, eos_token_ids=eos)


def tensor_targets(spec: ModelSpec) -> tuple[TensorTarget, ...]:
    """Every checkpoint tensor the model needs and where it goes, in checkpoint order."""
    return tuple(FAMILIES[spec.family].tensor_targets(spec))


def skipped_tensor(spec: ModelSpec, name: str) -> bool:
    """True for a tensor a checkpoint may hold that the model does not need (see `common.skipped`)."""
    return common.skipped(spec, name)


def _family_of(config: Mapping[str, Any], path: Path) -> Family:
    """`architectures` decides; a config without it is known by its `model_type`."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    names = architectures if isinstance(architectures, list) else []
    for family in FAMILIES.values():
        if any(name in family.ARCHITECTURES for name in names) or (
            not names and model_type in family.MODEL_TYPES
        ):
            return family
    known = "; ".join(f"{f.NAME} ({', '.join(f.ARCHITECTURES)})" for f in FAMILIES.values())
    if not names and model_type is None:
        raise CheckpointError(f"{path}: field 'architectures' is missing; known families: {known}")
    shown = f"'architectures' = {names}" if names else f"'model_type' = {model_type!r}"
    raise CheckpointError(f"{path}: field {shown} is not a known architecture; known families: {known}")
