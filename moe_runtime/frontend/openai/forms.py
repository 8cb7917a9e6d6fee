"""Forms: outputs as the bytes that clients of an endpoint expect, streamed or whole.

Owns the JSON of answers. Every chunk of plain text is two constant pieces around the encoded text.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from moe_runtime.frontend.openai.answers import Answer, AnswerForm, Delta
from moe_runtime.frontend.openai.choices import Choice, News
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.openai.logprobs import LogprobFormat, TextOffsets, each_of
from moe_runtime.frontend.text.tool_calls import CallDelta

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What all chunks of an answer say. `include_usage`: a streamed answer ends with a count of tokens."""

    id: str
    model: str
    include_usage: bool = False


def error_event(error: ApiError) -> bytes:
    """The last event of a stream that could not be finished."""
    return b"data: " + error.body + b"\n\n"


class Form(Protocol):
    """How an endpoint answers one request."""

    def opening(self, choices: Sequence[Choice]) -> bytes:
        """What a stream begins with."""

    def chunk(self, choice: Choice, news: News) -> bytes:
        """Events for what is new; may be empty."""

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """What a whole stream ends with."""

    def body(self, outputs: Sequence[tuple[Choice, News]]) -> bytes:
        """A whole answer; each choice comes with all of its text."""


def usage(choices: Sequence[Choice], copies: int) -> dict[str, Any]:
    """Tokens of an answer: each prompt once, though `copies` outputs follow from it."""
    firsts = choices[::copies]
    prompt = sum(len(c.live.request.prompt) for c in firsts)
    output = sum(c.num_tokens for c in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(c.live.cached_tokens for c in firsts)},
    }


class _Base:
    """The parts of a chunk that do not change."""

    kind: str
    chunk_kind: str

    def __init__(self, header: Header, logprobs: LogprobFormat | None, *, copies: int) -> None:
        self._header = header
        self._logprobs = logprobs
        self._copies = copies
        self._created = int(time.time())
        head = _encode(self._head(self.chunk_kind))
        self._begin = b"data: " + head[:-1] + b',"choices":['
        self._end = b'],"usage":null}\n\n' if header.include_usage else b"]}\n\n"

    def closing(self, choices: Sequence[Choice]) -> bytes:
        if not self._header.include_usage:
            return DONE
        last = {**self._head(self.chunk_kind), "choices": [], "usage": usage(choices, self._copies)}
        return b"data: " + _encode(last) + b"\n\n" + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        h = self._header
        return {"id": h.id, "object": kind, "created": self._created, "model": h.model}

    def _whole(self, choices: Sequence[Choice], fields: list[dict[str, Any]]) -> bytes:
        return _encode({**self._head(self.kind), "choices": fields, "usage": usage(choices, self._copies)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt as it is repeated. `spelled`: special tokens are part of the text."""

    text: str
    spelled: bool = False


class CompletionForm(_Base):
    """`echo`: each prompt, whose text is put before its outputs; empty if it is not wanted."""

    kind = chunk_kind = "text_completion"

    def __init__(
        self, header: Header, logprobs: LogprobFormat | None, *, copies: int, echo: Sequence[Echo] = ()
    ) -> None:
        super().__init__(header, logprobs, copies=copies)
        self._echo = echo
        self._offsets: dict[int, TextOffsets] = {}
        self._echoed: set[int] = set()

    def opening(self, choices: Sequence[Choice]) -> bytes:
        if self._logprobs is not None:
            return b""  # a prompt comes with its logprobs, which come with the first token
        return b"".join(self._event(c.index, self._prompt(c), None, None) for c in choices if self._echo)

    def chunk(self, choice: Choice, news: News) -> bytes:
        echo = self._scored_prompt(choice)
        begin = b"" if echo is None else self._event(choice.index, self._prompt(choice), echo, None)
        logprobs = self._listed(choice, news)
        if not (news.text or logprobs or news.finish_reason):
            return begin
        return begin + self._event(choice.index, news.text, logprobs, news.finish_reason)

    def body(self, outputs: Sequence[tuple[Choice, News]]) -> bytes:
        fields = [
            {
                "index": choice.index,
                "text": self._prompt(choice) + news.text,
                "logprobs": self._both_listed(choice, news),
                "finish_reason": news.finish_reason,
            }
            for choice, news in outputs
        ]
        return self._whole([c for c, _ in outputs], fields)

    def _prompt(self, choice: Choice) -> str:
        return self._echo[choice.index // self._copies].text if self._echo else ""

    def _both_listed(self, choice: Choice, news: News) -> msgspec.Raw | None:
        """As JSON at once, as the lists of a long prompt take many times its room."""
        listed = _one_list(self._scored_prompt(choice), self._listed(choice, news))
        return None if listed is None else msgspec.Raw(_encode(listed))

    def _scored_prompt(self, choice: Choice) -> dict[str, Any] | None:
        """The logprobs of the choice's prompt, once."""
        prompt = choice.live.prompt_logprobs
        if self._logprobs is None or prompt is None or choice.index in self._echoed:
            return None
        self._echoed.add(choice.index)
        offsets = self._logprobs.offsets(spelled=self._echo[choice.index // self._copies].spelled)
        return self._logprobs.completion(choice.live.request.prompt, [None, *each_of(prompt)], offsets)

    def _listed(self, choice: Choice, news: News) -> dict[str, Any] | None:
        if self._logprobs is None or news.first == news.last:
            return None
        live, tokens = choice.live, slice(news.first, news.last)
        offsets = self._offsets.get(choice.index)
        if offsets is None:
            offsets = self._offsets[choice.index] = self._logprobs.offsets(len(self._prompt(choice)))
        return self._logprobs.completion(live.token_ids[tokens], live.logprobs[tokens], offsets)

    def _event(self, index: int, text: str, logprobs: dict[str, Any] | None, reason: str | None) -> bytes:
        return b'%b{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._begin,
            index,
            _encode(text),
            b"null" if logprobs is None else _encode(logprobs),
            b"null" if reason is None else _encode(reason),
            self._end,
        )


class ChatForm(_Base):
    """`answers`: how outputs are read."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(
        self, header: Header, logprobs: LogprobFormat | None, *, copies: int, answers: AnswerForm
    ) -> None:
        super().__init__(header, logprobs, copies=copies)
        self._form = answers
        self._answers: dict[int, Answer] = {}

    def opening(self, choices: Sequence[Choice]) -> bytes:
        delta = _encode({"role": "assistant", "content": ""})
        return b"".join(self._event(c.index, delta, None, None) for c in choices)

    def chunk(self, choice: Choice, news: News) -> bytes:
        answer = self._answer(choice)
        delta = answer.feed(news.text)
        if news.finish_reason is not None:
            delta = _joined(delta, answer.finish())
        logprobs = self._listed(choice, news)
        if not (delta or logprobs or news.finish_reason):
            return b""
        reason = self._reason(answer, news.finish_reason)
        return self._event(choice.index, _encode(self._delta(choice, delta)), logprobs, reason)

    def body(self, outputs: Sequence[tuple[Choice, News]]) -> bytes:
        fields = []
        for choice, news in outputs:
            answer = self._answer(choice)
            delta = _joined(answer.feed(news.text), answer.finish())
            fields.append(
                {
                    "index": choice.index,
                    "message": self._message(choice, delta),
                    "logprobs": self._listed(choice, news),
                    "finish_reason": self._reason(answer, news.finish_reason),
                }
            )
        return self._whole([c for c, _ in outputs], fields)

    def _answer(self, choice: Choice) -> Answer:
        answer = self._answers.get(choice.index)
        if answer is None:
            answer = self._answers[choice.index] = self._form.answer()
        return answer

    def _reason(self, answer: Answer, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and answer.called else reason

    def _listed(self, choice: Choice, news: News) -> dict[str, Any] | None:
        if self._logprobs is None or news.first == news.last:
            return None
        live, tokens = choice.live, slice(news.first, news.last)
        return self._logprobs.chat(live.token_ids[tokens], live.logprobs[tokens])

    def _delta(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if delta.content:
            fields["content"] = delta.content
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.calls:
            fields["tool_calls"] = [self._call_delta(choice, call) for call in delta.calls]
        return fields

    def _call_delta(self, choice: Choice, call: CallDelta) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "index": call.index,
            "id": self._call_id(choice, call),
            "type": "function",
            "function": function,
        }

    def _message(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        calls: list[dict[str, Any]] = []
        for call in delta.calls:
            if call.name is not None:
                calls.append({"id": self._call_id(choice, call), "type": "function"})
                calls[-1]["function"] = {"name": call.name, "arguments": ""}
            calls[call.index]["function"]["arguments"] += call.arguments
        message: dict[str, Any] = {"role": "assistant", "content": delta.content}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if calls:
            message["content"] = delta.content or None
            message["tool_calls"] = calls
        return message

    def _call_id(self, choice: Choice, call: CallDelta) -> str:
        """An id that is unique among all calls: it follows from the answer's."""
        return f"call_{self._header.id.rpartition('-')[2]}_{choice.index}_{call.index}"

    def _event(self, index: int, delta: bytes, logprobs: dict[str, Any] | None, reason: str | None) -> bytes:
        return b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}%b' % (
            self._begin,
            index,
            delta,
            b"null" if logprobs is None else _encode(logprobs),
            b"null" if reason is None else _encode(reason),
            self._end,
        )


def _one_list(prompt: dict[str, Any] | None, output: dict[str, Any] | None) -> dict[str, Any] | None:
    if prompt is None or output is None:
        return prompt or output
    return {name: prompt[name] + output[name] for name in prompt}


def _joined(first: Delta, second: Delta) -> Delta:
    return Delta(
        first.content + second.content, first.reasoning + second.reasoning, first.calls + second.calls
    )
