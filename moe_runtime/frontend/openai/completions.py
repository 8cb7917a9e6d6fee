"""The request of /v1/completions."""

from typing import Annotated

from annotated_types import Ge, Le, MaxLen, MinLen

from moe_runtime.frontend.openai.schema import INT32, MAX_TOP_LOGPROBS, Body, SamplingFields, TokenId

DEFAULT_MAX_TOKENS = 16

Ids = Annotated[list[TokenId], MinLen(1)]
Prompts = str | Annotated[list[str], MinLen(1)] | Ids | Annotated[list[Ids], MinLen(1)]


class CompletionRequest(SamplingFields):
    """`prompt`: text, several texts, token ids, or several lists of them. No special tokens are added to
    a text; those spelled out in it count. `logprobs`: how many alternatives to each token are listed,
    those of the prompt with `echo`. `max_tokens`: 0 with `echo` only.
    """

    prompt: Prompts
    max_tokens: Annotated[int, Ge(0), Le(INT32)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        ids = [i for i in prompt if isinstance(i, int)]
        return [ids] if ids else [p for p in prompt if not isinstance(p, int)]


class TokenizeRequest(Body):
    """The request of /tokenize: a text, as a completion's prompt would be read."""

    model: Annotated[str, MinLen(1), MaxLen(256)] | None = None
    prompt: str


class DetokenizeRequest(Body):
    """The request of /detokenize; special tokens are left out of the text."""

    model: Annotated[str, MinLen(1), MaxLen(256)] | None = None
    tokens: list[TokenId]
