"""Answer: what the text of a chat output means: reasoning, content, tool calls.

Joins the readers of `frontend.text` in the order in which a model writes. Knows nothing of chunks.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from moe_runtime.frontend.text.reasoning import ReasoningSplit
from moe_runtime.frontend.text.tool_calls import CallDelta, ToolParser

Form = Literal["free", "named", "required"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of text made certain; falsy when that is nothing."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """How the outputs of one request are read.

    form         free text; arguments of the function `name`; or a list of calls that must be made
    reasoning    None: the model does not reason; otherwise whether the prompt opened the tag already
    make_parser  reads tool calls out of free text, if there are tools
    """

    form: Form = "free"
    name: str = ""
    reasoning: bool | None = None
    make_parser: Callable[[], ToolParser] | None = None

    def answer(self) -> "Answer":
        """A reader for one output."""
        match self.form:
            case "named":
                return NamedCall(self.name)
            case "required":
                return RequiredCalls()
        split = None if self.reasoning is None else ReasoningSplit(inside=self.reasoning)
        return FreeText(split, self.make_parser() if self.make_parser else None)


class Answer:
    """Reads one output."""

    called = False
    """The output ends with calls that the client should make."""

    def feed(self, text: str) -> Delta:
        """What `text` makes certain."""
        raise NotImplementedError

    def finish(self) -> Delta:
        """What was held back, now that nothing more comes."""
        raise NotImplementedError


class FreeText(Answer):
    """Reasoning first, if the model reasons, then content with calls in it, if there are tools."""

    def __init__(self, split: ReasoningSplit | None, parser: ToolParser | None) -> None:
        self._split, self._parser = split, parser

    def feed(self, text: str) -> Delta:
        reasoning = ""
        if self._split is not None:
            reasoning, text = self._split.feed(text)
        return self._parsed(reasoning, text, last=False)

    def finish(self) -> Delta:
        reasoning, text = self._split.finish() if self._split is not None else ("", "")
        return self._parsed(reasoning, text, last=True)

    def _parsed(self, reasoning: str, text: str, *, last: bool) -> Delta:
        if self._parser is None:
            return Delta(text, reasoning)
        found = self._parser.feed(text)
        content, calls = found.content, found.calls
        if last:
            rest = self._parser.finish()
            content, calls = content + rest.content, calls + rest.calls
        self.called = self._parser.num_calls > 0
        return Delta(content, reasoning, calls)


class NamedCall(Answer):
    """The output is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> Delta:
        if not text:
            return Delta()
        name, self._name = self._name, None
        return Delta(calls=(CallDelta(index=0, name=name, arguments=text),))

    def finish(self) -> Delta:
        return Delta()


class RequiredCalls(Answer):
    """The output is a JSON list of calls; they are known when it is complete."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> Delta:
        self._text += text
        return Delta()

    def finish(self) -> Delta:
        try:
            calls = [(str(c["name"]), json.dumps(c["parameters"])) for c in json.loads(self._text)]
        except (ValueError, TypeError, KeyError):  # cut short by max_tokens or a stop string
            return Delta(content=self._text)
        self.called = bool(calls)
        return Delta(
            calls=tuple(CallDelta(index=i, name=name, arguments=a) for i, (name, a) in enumerate(calls))
        )
