"""ApiError: what a client is told when its request cannot be answered, in OpenAI's form.

Owns the body, the status codes and the types that OpenAI's clients turn into exceptions.
"""

import math
from typing import Any, NoReturn

import msgspec
from pydantic import ValidationError

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An answer of `status`. `param` names the field at fault, `code` is for programs.

    `retry_after`: seconds after which asking again is worth while; 0 says nothing.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> bytes:
        """The JSON object that clients know."""
        return msgspec.json.encode({"error": self.fields})

    @property
    def fields(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"message": self.message, "type": kind, "param": self.param, "code": self.code}

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after:
            headers["retry-after"] = str(math.ceil(self.retry_after))
        return headers


def invalid(param: str, problem: str, *, code: str | None = None) -> NoReturn:
    """Raise a 400 for a field."""
    raise ApiError(400, f"{param}: {problem}", param=param, code=code)


# Fields of several forms: what they may be, instead of a complaint per form.
_FORMS = {
    "prompt": "must be a string, an array of strings, an array of token ids, or an array of those arrays",
    "stop": "must be a non-empty string of at most 256 characters, or an array of at most 16 of them",
    "tool_choice": 'must be "none", "auto", "required", or {"type": "function", "function": {"name": ...}}',
    "content": "must be a string or an array of text parts; other parts are not supported",
}


def from_validation(error: ValidationError) -> ApiError:
    """A 400 that names the first field at fault."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, location = first["type"], first["loc"]
    if kind == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg']}", code="invalid_json")
    for depth, part in enumerate(location):
        if part in _FORMS and kind != "missing":
            param = _dotted(location[: depth + 1])
            return ApiError(400, f"{param}: {_FORMS[str(part)]}", param=param, code="invalid_value")
    param = _dotted(location)
    if kind == "extra_forbidden":
        return ApiError(400, f"{param}: is not supported", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"{param}: is required", param=param, code="missing_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return ApiError(
        400, f"{param}: {message}" if param else message, param=param or None, code="invalid_value"
    )


def _dotted(location: tuple[int | str, ...]) -> str:
    """`messages[0].content` of a pydantic location, without the tags of unions that stand in it."""
    out, before = "", None
    for part in location:
        if isinstance(part, int):
            out += f"[{part}]"
        elif part == "[key]":
            continue
        elif not ((isinstance(before, int) or before == "response_format") and part in _TAGS):
            out += f".{part}" if out else part
        before = part
    return out


_TAGS = frozenset({"system", "developer", "user", "assistant", "tool", "text", "json_object", "json_schema"})
