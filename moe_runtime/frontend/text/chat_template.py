"""ChatTemplate: messages to the prompt's token ids, by the template that a checkpoint brings.

Owns finding the template and rendering it (transformers, in its sandbox). What a message may look
like is the API's business.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from moe_runtime.errors import CheckpointError, InputError
from moe_runtime.frontend.text import reasoning

_TAIL = 8  # tokens of a prompt's end that may hold the tag that opens the reasoning


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A rendered prompt. `reasoning_open`: it ends inside of `<think>`, so the output begins there."""

    token_ids: list[int]
    reasoning_open: bool


class ChatTemplate:
    """The chat template of a checkpoint. `text` is its source.

    Importing transformers takes seconds; it happens when one of these is made.
    """

    def __init__(self, checkpoint_dir: Path, text: str) -> None:
        from transformers import PreTrainedTokenizerFast

        self.text = text
        try:
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint_dir, local_files_only=True)
        except Exception as error:  # noqa: BLE001, the library raises no narrower class
            raise CheckpointError(
                f"{checkpoint_dir}: transformers cannot read the tokenizer: {error}"
            ) from None
        parameters = inspect.signature(self._tokenizer.apply_chat_template).parameters.values()
        named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        self._not_variables = named - {"documents"}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """The prompt that asks for the next assistant message; `options` are variables of the template.

        Control tokens spelled out in messages or tools are encoded as plain text. Raises InputError
        for what the template refuses, and for options that would steer transformers instead of it.
        """
        import jinja2

        if taken := sorted(self._not_variables & set(options or {})):
            raise InputError(f"{taken[0]} is no variable of a chat template")
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(m) for m in messages],
                tools=[dict(t) for t in tools] if tools else None,
                chat_template=self.text,
                add_generation_prompt=True,
                tokenize=True,
                sanitize_control_tokens=True,
                return_dict=False,
                **dict(options or {}),
            )
        except (
            jinja2.TemplateError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
        ) as error:
            raise InputError(f"the model's chat template refuses these messages: {error}") from None
        tail = self._tokenizer.decode(ids[-_TAIL:], skip_special_tokens=False)
        opened = str(tail).rstrip().endswith(reasoning.OPEN)
        return ChatPrompt(token_ids=[int(i) for i in ids], reasoning_open=opened)


def find_template(checkpoint_dir: Path) -> str | None:
    """The source of a checkpoint's chat template: `chat_template.jinja`, or that of tokenizer_config.json.

    Of several named ones `default`. None if there is none; CheckpointError for a damaged file.
    """
    file = checkpoint_dir / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from None
    config = checkpoint_dir / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        template = msgspec.json.decode(config.read_bytes()).get("chat_template")
        if isinstance(template, list):
            template = {t["name"]: t["template"] for t in template}.get("default")
    except (msgspec.DecodeError, OSError, RecursionError, AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"{config}: not a tokenizer's configuration: {error!r}") from None
    return template if isinstance(template, str) else None
