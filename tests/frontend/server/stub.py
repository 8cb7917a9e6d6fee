"""A server without ranks: its outputs are written in advance, its tokens come as fast as they can."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.engine.messages import Logprobs, PromptLogprobs, RankTotals, Status
from moe_runtime.frontend.admission import Admission, AdmissionLimits
from moe_runtime.frontend.board import Board
from moe_runtime.frontend.live import Live
from moe_runtime.frontend.metrics import Metrics
from moe_runtime.frontend.openai.errors import ApiError
from moe_runtime.frontend.openai.sampling import ModelLimits
from moe_runtime.frontend.peers import PeerMessage, Peers
from moe_runtime.frontend.server.app import make_app
from moe_runtime.frontend.server.gate import Gate
from moe_runtime.frontend.server.lifecycle import Ending
from moe_runtime.frontend.server.logs import Log
from moe_runtime.frontend.server.prepare import ServedModel
from moe_runtime.frontend.server.service import Service
from moe_runtime.frontend.text.chat_template import ChatTemplate, find_template
from moe_runtime.frontend.text.vocabulary import read_vocabulary
from moe_runtime.spec.requests import FinishReason, Request
from tests.frontend.text import tokenizers_for_tests

LONGEST = 600
END = 1  # the id of </s>
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' and not m.tool_call_id %}"
    "{{ raise_exception('no id') }}{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}\n<tool_call> {% endif %}"
    "{% if add_generation_prompt %}assistant:{% if thinking %}<think>{% endif %}{% endif %}{# </think> #}"
)


@dataclass
class StubBackend:
    """`outputs`: what is said, one after the other, the last one for ever; then the end of sequence.

    `hold` keeps every token back while it is clear, as it is after `hold_after` tokens; `missing` ranks
    keep the server from being ready; `refuse` is what ranks answer instead.
    """

    tokenizer: Tokenizer
    outputs: list[str] = field(default_factory=lambda: ["some words"])
    missing: list[str] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    hold_after: int = 1 << 30
    refuse: str | None = None
    submitted: list[Request] = field(default_factory=list)
    running: dict[int, Live] = field(default_factory=dict)
    ranks_chosen: list[int | None] = field(default_factory=list)
    _ids: int = 0
    _tasks: set[asyncio.Task] = field(default_factory=set)

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def submit(
        self, prompt, sampling, *, request_id, priority, cache_salt, rank, notify: Callable[[], None]
    ) -> Live:
        request = Request(
            id=request_id, prompt=prompt, sampling=sampling, priority=priority, cache_salt=cache_salt
        )
        self.submitted.append(request)
        self.ranks_chosen.append(rank)
        live = self.running[request_id] = Live(request, sent=time.monotonic(), notify=notify)
        output = self.outputs.pop(0) if len(self.outputs) > 1 else self.outputs[0]
        task = asyncio.get_running_loop().create_task(self._speak(live, output))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return live

    def abort(self, live: Live, reason: str = FinishReason.ABORT, error: str | None = None) -> None:
        if self.running.pop(live.request.id, None) is not None:
            live.finish_reason, live.error = reason, error
            live.notify()

    async def _speak(self, live: Live, output: str) -> None:
        sampling = live.request.sampling
        ids = [*self.tokenizer.encode(output), END]
        if not sampling.max_tokens:
            await self.hold.wait()
            live.refused = self.refuse is not None
            live.prompt_logprobs = prompt_logprobs(live.request)
            self.abort(live, FinishReason.ERROR if live.refused else FinishReason.LENGTH, self.refuse)
            return
        for number, token in enumerate(ids, start=1):
            await self.hold.wait()
            await asyncio.sleep(0)
            if number == self.hold_after:
                self.hold.clear()
            if live.finish_reason is not None:
                return
            if self.refuse is not None:
                live.refused = True
                self.abort(live, FinishReason.ERROR, self.refuse)
                return
            live.prompt_logprobs = prompt_logprobs(live.request)
            live.token_ids.append(token)
            live.token_times.append(time.monotonic())
            if sampling.logprobs >= 0:
                live.logprobs.append(
                    Logprobs(
                        -0.5, [token, 5][: sampling.logprobs], [-0.5, float("-inf")][: sampling.logprobs]
                    )
                )
            reason = FinishReason.STOP if token == END else FinishReason.LENGTH
            if token == END or number == sampling.max_tokens:
                del self.running[live.request.id]
                live.finish_reason = reason
            live.notify()


def prompt_logprobs(request: Request) -> PromptLogprobs | None:
    """Of the token at position p: -p. It is the best one; those after it in the vocabulary follow."""
    count, tokens = request.sampling.prompt_logprobs, np.array(request.prompt[1:], np.int32)
    if count < 0:
        return None
    chosen = -np.arange(1, len(request.prompt), dtype=np.float32)
    ids = tokens[:, None] + np.arange(count, dtype=np.int32)
    top = chosen[:, None] - np.arange(count, dtype=np.float32)
    return PromptLogprobs(count, chosen.tobytes(), ids.tobytes(), top.tobytes())


@dataclass
class StubServer:
    """The application and what is behind it; `lines` is its log."""

    app: Gate
    backend: StubBackend
    service: Service
    ending: Ending
    lines: list[str]
    peers: Peers


def _nobody(number: int, message: PeerMessage) -> None:
    """There is no other frontend."""


def write_checkpoint(folder: Path, template: str | None = TEMPLATE) -> Path:
    """A tokenizer and a chat template: all that a frontend reads of a checkpoint."""
    tokenizers_for_tests.byte_level(folder)
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def read_model(folder: Path) -> ServedModel:
    template = find_template(folder)
    vocabulary = read_vocabulary(folder)
    return ServedModel(
        name="stub",
        created=1,
        tokenizer=Tokenizer(folder),
        vocabulary=vocabulary,
        template=None if template is None else ChatTemplate(folder, template),
        limits=ModelLimits(vocab_size=vocabulary.size, longest=LONGEST, longest_prompt=LONGEST),
        max_choices=16,
    )


def make_server(model: ServedModel, **options) -> StubServer:
    """`options`: keys, admin_keys, max_body_bytes, timeout, queue, number, others (frontends, which are then
    told apart), tell (them). Call it inside of a running loop.
    """
    backend = StubBackend(model.tokenizer)
    backend.hold.set()
    queue = options.get("queue", 64)
    admission = Admission(
        AdmissionLimits(
            longest=LONGEST,
            longest_prompt=LONGEST,
            running_requests=queue,
            running_tokens=LONGEST * queue,
            queue_requests=queue,
            queue_tokens=LONGEST * queue,
            max_wait=1e9,
            timeout=options.get("timeout", 60.0),
        )
    )
    number, others = options.get("number", 0), options.get("others", ())
    metrics = Metrics(
        Board(), ranks_per_node=1, admission=admission, frontend=number, frontends=1 + len(others)
    )
    peers = Peers(number, others, options.get("tell", _nobody))
    service = Service(
        backend,
        vocabulary=model.vocabulary,
        admission=admission,
        metrics=metrics,
        timeout=options.get("timeout", 60.0),
        ranks_per_node=1,
    )
    lines: list[str] = []
    log = Log("json", lines.append, {})
    ending = Ending(service, log)
    app = make_app(model, service, advice=dict, start_drain=ending.drain, peers=peers)
    gate = Gate(
        app,
        keys=options.get("keys", ()),
        admin_keys=options.get("admin_keys", ()),
        max_body_bytes=options.get("max_body_bytes", 1 << 20),
        log=log,
    )
    return StubServer(gate, backend, service, ending, lines, peers)


def shutting_down() -> ApiError:
    """What requests are told when the server cannot wait for them."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


def rank_status(rank: int, time: float, **fields) -> Status:
    """What a rank of `unified-0` says of itself."""
    base = {
        "step": 1, "waiting": 0, "waiting_tokens": 0, "running": 0, "pulling": 0, "kv_blocks": 100,
        "kv_used": 25, "kv_cached": 10, "block_tokens": 16, "others_tokens": 0, "others_requests": 0,
        "chunk_tokens": 256, "totals": RankTotals(),
    }  # fmt: skip
    known = {"instance": "unified-0", "deployment": "unified", "rank": rank, "time": time}
    return Status(**{**base, **known, **fields})
