"""The OpenAPI description of bodies that the endpoints read themselves, and of errors."""

from typing import Any

from pydantic import BaseModel

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_CONTENT = {"application/json": {"schema": _ERROR}}
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": _CONTENT}
    for status, text in (
        (400, "A field is missing, unknown or has a value that cannot be served"),
        (401, "The API key is missing or wrong"),
        (403, "Not allowed"),
        (404, "No such model or request"),
        (409, "A reload was dropped; the old weights are served"),
        (413, "The body is too large"),
        (429, "Too much to do; Retry-After says when to ask again"),
        (500, "Internal error"),
        (503, "Not ready, or shutting down"),
        (504, "Not finished in time"),
    )
}


def describe(body: type[BaseModel], model_name: str | None = None) -> dict[str, Any]:
    """The `requestBody` of an endpoint that parses `body`; references are written out.

    `model_name` is the one value that the field `model` may have; None: there is no such field.
    """
    schema = body.model_json_schema()
    definitions = schema.pop("$defs", {})
    if model_name is not None:
        schema["properties"]["model"] = {"type": "string", "enum": [model_name]}
    resolved = _resolved(schema, definitions)
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": resolved}}}}


def _resolved(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [_resolved(v, definitions) for v in value]
    if not isinstance(value, dict):
        return value
    if isinstance(reference := value.get("$ref"), str):
        return _resolved(definitions[reference.rpartition("/")[2]], definitions)
    return {k: _resolved(v, definitions) for k, v in value.items() if k != "discriminator"}
