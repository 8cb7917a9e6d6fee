"""What completions and chat completions have in common: fields, types and ranges.

Owns the request's form. Unknown fields are errors; null means the default; numbers are strict (true
is not 1, "1" is not 1, NaN is no number). What a value means for the model is `sampling`'s business.
"""

from typing import Annotated, TypeVar

from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from pydantic import BaseModel, ConfigDict, StrictInt, StringConstraints, ValidationError

from moe_runtime.frontend.openai.errors import ApiError, from_validation

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
INT32 = 2**31 - 1


class Body(BaseModel):
    """Base of all request parts: strict, closed, finite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


TokenId = Annotated[int, Ge(0), Le(INT32)]
Name = Annotated[str, MinLen(1), MaxLen(256)]
StopString = Annotated[str, MinLen(1), MaxLen(256)]
BiasKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,10}$")]
Penalty = Annotated[float, Ge(-2), Le(2)]


class StreamOptions(Body):
    """`include_usage`: a last chunk without choices that counts tokens."""

    include_usage: bool | None = None


class SamplingFields(Body):
    """Fields of both endpoints. Those after `user` are not OpenAI's."""

    model: Name
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Ge(1), Le(INT32)] | None = None
    n: Annotated[int, Ge(1), Le(1024)] | None = None
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[BiasKey, Annotated[float, Ge(-100), Le(100)]], MaxLen(1024)] | None = None
    seed: Annotated[StrictInt, Ge(-(2**63)), Le(2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], MaxLen(MAX_STOPS)] | None = None
    user: Annotated[str, MaxLen(256)] | None = None
    top_k: Annotated[int, Ge(0), Le(INT32)] | None = None
    min_p: Annotated[float, Ge(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Gt(0), Le(10)] | None = None
    min_tokens: Annotated[int, Ge(0), Le(INT32)] | None = None
    stop_token_ids: Annotated[list[TokenId], MaxLen(256)] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Ge(-1000), Le(1000)] | None = None
    cache_salt: Annotated[str, MaxLen(256)] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings, none or more."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


Parsed = TypeVar("Parsed", bound=Body)


def parse(model: type[Parsed], body: bytes) -> Parsed:
    """A request out of its body; ApiError 400 that names the field at fault.

    The parser refuses what is nested deeper than 200 levels.
    """
    try:
        parsed = model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None
    if isinstance(parsed, SamplingFields) and parsed.stream_options is not None and not parsed.stream:
        raise ApiError(
            400, "stream_options: needs stream: true", param="stream_options", code="invalid_value"
        )
    return parsed
