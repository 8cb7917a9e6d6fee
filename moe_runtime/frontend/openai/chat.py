"""The request of /v1/chat/completions: messages, tools, and the form the answer must have."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import Field, StringConstraints

from moe_runtime.frontend.openai.errors import invalid
from moe_runtime.frontend.openai.schema import MAX_TOP_LOGPROBS, Body, SamplingFields
from moe_runtime.frontend.openai.structure import check_schema
from moe_runtime.spec.requests import Structure

FunctionName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(Body):
    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], MinLen(1)]


class SystemMessage(Body):
    """`developer` is read as `system`."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class FunctionCall(Body):
    name: FunctionName
    arguments: str


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Body):
    """An earlier answer. Fields that only null may fill are what other servers send along."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Function(Body):
    """A function the model may call; `parameters` is a JSON schema."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    """`strict` changes nothing: an output always keeps to the schema."""

    name: Annotated[str, MinLen(1), MaxLen(64)]
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class ChatRequest(SamplingFields):
    """`chat_template_kwargs` are variables of the model's template, e.g. {"enable_thinking": false}."""

    messages: Annotated[list[Message], MinLen(1), MaxLen(4096)]
    max_completion_tokens: Annotated[int, Ge(1), Le(2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], MaxLen(128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def choice(self) -> str:
        """none, auto, required, or the name of the function that must be called."""
        if not self.tools:
            return "none"
        if isinstance(self.tool_choice, NamedTool):
            return self.tool_choice.function.name
        return self.tool_choice or "auto"

    @property
    def offered_tools(self) -> list[Tool]:
        """The tools that the model is shown."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def forced(self) -> bool:
        """A tool must be called: the whole output is its arguments, or a list of calls."""
        return self.choice not in ("none", "auto")


def check_chat(request: ChatRequest) -> None:
    """ApiError 400 for fields that contradict each other, or that nothing here could honour."""
    if request.max_tokens is not None and request.max_completion_tokens is not None:
        invalid("max_completion_tokens", "means the same as max_tokens: give one of them")
    if request.top_logprobs is not None and not request.logprobs:
        invalid("top_logprobs", "needs logprobs: true")
    if request.tool_choice not in (None, "none", "auto") and not request.tools:
        invalid("tool_choice", "needs tools")
    names = [t.function.name for t in request.tools or ()]
    if len(set(names)) < len(names):
        invalid("tools", "two functions have the same name")
    if isinstance(request.tool_choice, NamedTool) and request.choice not in names:
        invalid("tool_choice", f"no tool is called {request.choice!r}")
    if request.parallel_tool_calls is False and request.choice == "auto":
        invalid("parallel_tool_calls", "false works with tool_choice required or a named function only")
    for i, tool in enumerate(request.tools or ()):
        if tool.function.strict and not request.forced:
            invalid(
                f"tools[{i}].function.strict", "true works with tool_choice required or a named function only"
            )
        check_schema(tool.function.parameters or {}, f"tools[{i}].function.parameters")
    if request.response_format is not None and request.response_format.type != "text":
        if request.choice != "none":
            invalid("response_format", "cannot be combined with tools that may be called")
        if isinstance(request.response_format, JsonSchemaFormat):
            check_schema(request.response_format.json_schema.schema_, "response_format.json_schema.schema")


def structure_of(request: ChatRequest) -> Structure | None:
    """What the output is constrained to: a format, or the calls that must be made."""
    match request.response_format:
        case JsonObjectFormat():
            return Structure(kind="json")
        case JsonSchemaFormat(json_schema=given):
            return Structure(kind="json_schema", schema=json.dumps(given.schema_))
    if not request.forced:
        return None
    functions = {t.function.name: t.function for t in request.tools or ()}
    if request.choice != "required":
        return Structure(kind="json_schema", schema=json.dumps(_parameters(functions[request.choice])))
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": f.name}, "parameters": _parameters(f)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for f in functions.values()
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return Structure(kind="json_schema", schema=json.dumps(schema))


def _parameters(function: Function) -> Mapping[str, Any]:
    return function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def template_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """The messages as chat templates expect them: plain text, and arguments of calls as objects."""
    return [_template_message(m) for m in request.messages]


def _template_message(message: Message) -> dict[str, Any]:
    out = message.model_dump(exclude_none=True)
    if out["role"] == "developer":
        out["role"] = "system"
    content = message.content
    if not isinstance(content, str):
        out["content"] = "\n".join(p.text for p in content or ())
    for call in out.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue  # not JSON: shown to the model as it was written
    return out
