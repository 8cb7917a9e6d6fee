#!/usr/bin/env python3
"""What the server itself costs: CPU per output token of a frontend, against a plain FastAPI echo.

    python benchmarks/frontend.py checkpoints/small-deepseek-v3 [--out frontend.jsonl] [--check]

A stub engine stands in for a rank: it sends a step message with one token per stream every `--pace`
milliseconds. `--streams` clients read streamed completions. Each server runs in a process of its own,
whose CPU time is counted while all streams run; tokens per CPU second are output tokens/s per core.

server    what it does for each token
ours      the frontend of `moe-runtime serve`: fleet, text, stop strings, metrics, OpenAI's chunks
echo      a FastAPI StreamingResponse per stream, fed from the same step messages: look-up of the token's
          text, json.dumps of the same chunk
bare      the same StreamingResponse, chunks made beforehand, no messages: the floor of the web stack

Output: a JSON line per measurement, then one with medians and ratios. `--check` exits with 1 if ours is
below 0.6 of echo.
"""

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop
import zmq
import zmq.asyncio
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.engine.messages import Abort, Hello, Ready, StepTokens, Submit, ToFrontend, Token, ToRank
from moe_runtime.engine.sockets import Inbox, Outbox
from moe_runtime.frontend.admission import Admission, derive_limits
from moe_runtime.frontend.board import Board
from moe_runtime.frontend.bootstrap import Bootstrap, RankAddress
from moe_runtime.frontend.fleet import Fleet
from moe_runtime.frontend.metrics import Metrics
from moe_runtime.frontend.openai.sampling import ModelLimits
from moe_runtime.frontend.server.app import make_app
from moe_runtime.frontend.server.gate import Gate
from moe_runtime.frontend.server.logs import Log
from moe_runtime.frontend.server.prepare import ServedModel
from moe_runtime.frontend.server.service import Service
from moe_runtime.frontend.text.vocabulary import Vocabulary, read_vocabulary
from moe_runtime.report.machine import read_commit, read_machine
from moe_runtime.spec.requests import Request as RankRequest
from moe_runtime.spec.requests import SamplingParams

TARGET = 0.6
AIM_MICROSECONDS = 60.0
SERVERS = ("ours", "echo", "bare")
LONGEST = 1 << 20
TICK = os.sysconf("SC_CLK_TCK")
COUNT = "tokens"  # the file in which the engine says how many tokens it has sent


def texts(vocabulary: Vocabulary) -> list[int]:
    """Ids that are whole pieces of text, so that each makes one event."""
    return [i for i, b in enumerate(vocabulary.text_bytes) if b and b.isascii()]


# -- the stub engine ---------------------------------------------------------------------------------


def run_engine(folder: Path, checkpoint: Path, pace: float) -> None:
    """A rank that thinks of nothing: a token for every request in each step."""
    ids = texts(read_vocabulary(checkpoint))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[ToRank] = Inbox(context, f"ipc://{folder}/rank", ToRank)
    outbox = Outbox(context, linger_ms=0)
    address, running, draw = "", dict[int, int](), random.Random(0)
    count, sent = folder / COUNT, 0
    due = time.monotonic()
    while True:
        for message in inbox.drain():
            match message:
                case Hello():
                    address = message.address
                    outbox.send(address, Ready(instance="unified-0", rank=0))
                case Submit(request=request):
                    running[request.id] = 0
                case Abort(request=request_id):
                    running.pop(request_id, None)
        if running:
            tokens = [Token(request, draw.choice(ids)) for request in running]
            outbox.send(address, StepTokens(instance="unified-0", rank=0, tokens=tokens))
            sent += len(tokens)
            count.write_text(str(sent))
        due = max(due + pace, time.monotonic() - pace)
        time.sleep(max(0.0, due - time.monotonic()))


# -- the servers -------------------------------------------------------------------------------------


async def serve(app: Any, port: int) -> None:
    config = uvicorn.Config(
        app, port=port, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False
    )
    await uvicorn.Server(config).serve()


async def run_ours(folder: Path, checkpoint: Path, port: int) -> None:
    rank = RankAddress(
        instance="unified-0",
        deployment="unified",
        rank=0,
        address=f"ipc://{folder}/rank",
        kv_tokens=LONGEST,
        max_sequences=1024,
    )
    fleet = Fleet(Bootstrap(frontend=0, frontends=1, address=f"ipc://{folder}/frontend", ranks=[rank]))
    await fleet.start()
    vocabulary = read_vocabulary(checkpoint)
    admission = Admission(
        derive_limits(
            decode_ranks=1,
            rank_kv_tokens=1 << 30,
            rank_sequences=1024,
            prefill_kv_tokens=1 << 30,
            max_positions=LONGEST,
            ttft_seconds=60.0,
            timeout=600.0,
        )
    )
    metrics = Metrics(Board(), ranks_per_node=1, admission=admission)
    service = Service(
        fleet, vocabulary=vocabulary, admission=admission, metrics=metrics, timeout=600.0, ranks_per_node=1
    )
    model = ServedModel(
        name="m",
        created=0,
        tokenizer=Tokenizer(checkpoint),
        vocabulary=vocabulary,
        template=None,
        limits=ModelLimits(vocab_size=vocabulary.size, longest=LONGEST, longest_prompt=LONGEST),
        max_choices=1,
    )
    app = make_app(model, service, advice=dict, start_drain=lambda: None, peers=fleet.peers)
    log = Log("plain", lambda line: None, {})
    watch = asyncio.create_task(service.watch_deadlines())
    await serve(Gate(app, keys=(), admin_keys=(), max_body_bytes=1 << 20, log=log), port)
    watch.cancel()


def chunk(text: str) -> str:
    """The chunk that a client gets, as a plain server would write it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    head = {"id": "cmpl-0123456789abcdef01234567", "object": "text_completion", "created": 1, "model": "m"}
    return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"


async def run_echo(folder: Path, checkpoint: Path, port: int) -> None:
    table = [b.decode("utf-8", "replace") for b in read_vocabulary(checkpoint).text_bytes]
    context: zmq.asyncio.Context = zmq.asyncio.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind(f"ipc://{folder}/frontend")
    outbox = Outbox(zmq.Context.shadow(context.underlying))
    rank = f"ipc://{folder}/rank"
    outbox.send(rank, Hello(frontend=0, address=f"ipc://{folder}/frontend"))
    queues: dict[int, asyncio.Queue[int]] = {}
    numbers = itertools.count()
    app = FastAPI()

    async def read() -> None:
        decoder = msgspec.msgpack.Decoder(ToFrontend)
        while True:
            message = decoder.decode(await inbox.recv())
            if isinstance(message, StepTokens):
                for token in message.tokens:
                    if token.request in queues:
                        queues[token.request].put_nowait(token.token)

    async def stream(number: int) -> AsyncIterator[str]:
        queue = queues[number] = asyncio.Queue()
        request = RankRequest(id=number, prompt=[5], sampling=SamplingParams())
        outbox.send(rank, Submit(request=request, handoff=False))
        while True:
            yield chunk(table[await queue.get()])

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        await request.json()
        return StreamingResponse(stream(next(numbers)), media_type="text/event-stream")

    reader = asyncio.create_task(read())
    await serve(app, port)
    reader.cancel()


async def run_bare(port: int, pace: float) -> None:
    app = FastAPI()
    text = chunk(" word")

    async def stream() -> AsyncIterator[str]:
        due = time.monotonic()
        while True:
            yield text
            due += pace
            await asyncio.sleep(due - time.monotonic())

    @app.post("/v1/completions")
    async def completions(request: Request) -> StreamingResponse:
        await request.json()
        return StreamingResponse(stream(), media_type="text/event-stream")

    await serve(app, port)


# -- the clients -------------------------------------------------------------------------------------


class Clients:
    """Streams over plain sockets; `events` counts what came."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.events = 0

    async def read(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        body = json.dumps(
            {"model": "m", "prompt": [5], "max_tokens": LONGEST - 8, "stream": True, "stop": ["\0never"]}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            while data := await reader.read(65536):
                self.events += data.count(b"data: ")
        finally:
            writer.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


async def measure(pid: int, port: int, folder: Path, *, streams: int, seconds: float) -> dict[str, float]:
    """A chunk may hold several tokens, so those of the engine count, where there is one."""
    clients = Clients(port)

    def tokens_so_far() -> int:
        if not (folder / COUNT).exists():
            return clients.events
        while not (text := (folder / COUNT).read_text()):  # just being written
            pass
        return int(text)

    tasks = [asyncio.create_task(clients.read()) for _ in range(streams)]
    await asyncio.sleep(1.0)  # all streams run
    before, cpu, began = tokens_so_far(), cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(seconds)
    wall = time.monotonic() - began
    tokens, used = tokens_so_far() - before, cpu_seconds(pid) - cpu
    failed = [t for t in tasks if t.done()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert not failed, f"{len(failed)} streams ended early"
    return {
        "tokens": tokens,
        "tokens_per_second": tokens / wall,
        "core_share": used / wall,
        "microseconds_per_token": 1e6 * used / tokens,
        "tokens_per_core_second": tokens / used,
    }


def one(kind: str, options: argparse.Namespace, port: int) -> dict[str, float]:
    """Start an engine and a server, measure, end both."""
    with tempfile.TemporaryDirectory(prefix="frontend-") as folder:
        base = [sys.executable, __file__, str(options.checkpoint), "--folder", folder, "--port", str(port)]
        base += ["--pace", str(options.pace)]
        roles = [kind] if kind == "bare" else [kind, "engine"]
        processes = [subprocess.Popen([*base, "--role", role]) for role in roles]
        try:
            deadline = time.monotonic() + 60
            while True:
                try:
                    asyncio.run(asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 1))
                    break
                except OSError:
                    assert time.monotonic() < deadline, f"{kind} does not listen"
                    time.sleep(0.1)
            pid = processes[0].pid
            return asyncio.run(
                measure(pid, port, Path(folder), streams=options.streams, seconds=options.seconds)
            )
        finally:
            for process in processes:
                process.kill()
                process.wait()


def compare(options: argparse.Namespace) -> int:
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in SERVERS}
    lines: list[dict[str, Any]] = []
    port = 18200
    for round_ in range(options.rounds):
        for kind in SERVERS:
            port += 1
            figures = one(kind, options, port)
            found[kind].append(figures)
            lines.append({"server": kind, "round": round_, **figures})
            print(json.dumps(lines[-1]), flush=True)
    micros = {
        kind: statistics.median(f["microseconds_per_token"] for f in figures)
        for kind, figures in found.items()
    }
    ratio = micros["echo"] / micros["ours"]
    lines.append(
        {
            "summary": {f"{kind}_microseconds_per_token": round(value, 1) for kind, value in micros.items()},
            "ratio_to_echo": round(ratio, 2),
            "ratio_to_bare": round(micros["bare"] / micros["ours"], 2),
            "target_ratio": TARGET,
            "aim_microseconds": AIM_MICROSECONDS,
            "streams": options.streams,
            "pace_ms": options.pace,
            "commit": read_commit(),
            "machine": msgspec.to_builtins(read_machine(hardware="cpu-host", device="cpu")),
        }
    )
    print(json.dumps(lines[-1]))
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 1 if options.check and ratio < TARGET else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--pace", type=float, default=20.0, help="milliseconds between steps")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", action="store_true")
    for hidden in ("--role", "--folder", "--port"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, pace = Path(options.folder or "."), options.pace / 1e3
    match options.role:
        case None:
            return compare(options)
        case "engine":
            run_engine(folder, options.checkpoint, pace)
        case "ours":
            uvloop.run(run_ours(folder, options.checkpoint, int(options.port)))
        case "echo":
            uvloop.run(run_echo(folder, options.checkpoint, int(options.port)))
        case "bare":
            uvloop.run(run_bare(int(options.port), pace))
    return 0


if __name__ == "__main__":
    sys.exit(main())
