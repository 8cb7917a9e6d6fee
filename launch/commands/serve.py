"""`moe-runtime serve`: an OpenAI-compatible server in front of the ranks of a plan."""

import argparse
import os
import socket
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.errors import PlanError
from moe_runtime.frontend.admission import Admission, derive_limits
from moe_runtime.frontend.advice import Advice, Policy, advise, signals_of
from moe_runtime.frontend.board import Board
from moe_runtime.frontend.experts import Experts
from moe_runtime.frontend.fleet import Fleet
from moe_runtime.frontend.metrics import Metrics
from moe_runtime.frontend.openai.sampling import ModelLimits
from moe_runtime.frontend.server.logs import Log
from moe_runtime.frontend.server.prepare import ServedModel
from moe_runtime.frontend.server.service import Service
from moe_runtime.frontend.text.chat_template import ChatTemplate, find_template
from moe_runtime.frontend.text.vocabulary import read_vocabulary
from moe_runtime.launch import environment, session
from moe_runtime.launch.console import write
from moe_runtime.launch.expert_load import dump_expert_load
from moe_runtime.launch.frontends import listen
from moe_runtime.launch.preflight import Preflight
from moe_runtime.launch.reload import require_replacement
from moe_runtime.plan.effective import EffectiveDeployment

API_KEYS, ADMIN_KEYS = "MOE_RUNTIME_API_KEYS", "MOE_RUNTIME_ADMIN_KEYS"
STATUS_SECONDS = 1.0


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    return session.run(
        arguments.plan,
        arguments.overrides,
        argv,
        check=check,
        work=partial(work, expert_load=arguments.dump_expert_load),
        inputs={},
        outputs={"--dump-expert-load": arguments.dump_expert_load},
        timeline=None,
        serve=True,
    )


def check(flight: Preflight) -> None:
    """Everything that would keep a server from answering, before a rank starts."""
    folder = Path(flight.effective.model.path)
    Tokenizer(folder)
    read_vocabulary(folder)
    find_template(folder)
    _keys(API_KEYS)
    _keys(ADMIN_KEYS)
    for listener in listen(flight.effective.server):
        listener.close()


async def work(flight: Preflight, fleet: Fleet, expert_load: Path | None) -> int:
    """One frontend: serve until told to end. The first one writes what was counted to `expert_load`."""
    # Imported here, as only frontends need a web server.
    from moe_runtime.frontend.server.app import make_app
    from moe_runtime.frontend.server.experts_admin import add_experts_admin
    from moe_runtime.frontend.server.gate import Gate
    from moe_runtime.frontend.server.lifecycle import Ending, run_server

    server = flight.effective.server
    log = Log(server.log, write, {"frontend": fleet.number} if server.frontends > 1 else {})
    started = time.monotonic()
    service = _service(flight, fleet)
    ending = Ending(service, log)
    advisor = _Advisor(flight, service)
    model = _served_model(flight)
    app = make_app(model, service, advice=advisor.advice, start_drain=ending.drain, peers=fleet.peers)
    experts = Experts(fleet)
    add_experts_admin(app, experts, partial(require_replacement, flight))
    gate = Gate(
        app,
        keys=_keys(API_KEYS),
        admin_keys=_keys(ADMIN_KEYS),
        max_body_bytes=server.max_body_bytes,
        log=log,
    )

    async def ranks() -> None:
        await fleet.start(on_wait=lambda missing: log("waiting", {"ranks": ", ".join(missing)}))
        fleet.watch(STATUS_SECONDS, service.metrics.observe_status)
        advisor.load_seconds = time.monotonic() - started
        log("ready", {"model": model.name, "url": f"http://{server.host}:{server.port}"})
        await fleet.until_failure()

    await run_server(
        gate,
        socket.socket(fileno=int(os.environ[environment.SERVE_FD])),
        service=service,
        ranks=ranks(),
        ending=ending,
        grace=server.grace_s,
        log=log,
    )
    if expert_load is not None and fleet.number == 0 and not fleet.missing:
        await dump_expert_load(experts, expert_load)
    return 0


def _service(flight: Preflight, fleet: Fleet) -> Service:
    plan = flight.effective
    decode, prefill = _deployment(flight, "decode"), _deployment(flight, "prefill")
    instances = sum(i.deployment == decode.name for i in plan.instances)
    limits = derive_limits(
        decode_ranks=instances * decode.expert_parallel,
        prompt_ranks=sum(len(i.ranks) for i in plan.instances if i.deployment == prefill.name),
        rank_kv_tokens=_kv_tokens(decode),
        rank_sequences=decode.scheduler.max_sequences,
        prefill_kv_tokens=_kv_tokens(prefill),
        max_positions=flight.model.max_positions,
        ttft_seconds=plan.slo.ttft_ms / 1e3,
        timeout=plan.server.timeout_s,
    )
    admission = Admission(limits)
    board = Board(fleet.ranks)
    metrics = Metrics(
        board,
        ranks_per_node=plan.cluster.ranks_per_node,
        admission=admission,
        frontend=fleet.number,
        frontends=plan.server.frontends,
    )
    return Service(
        fleet,
        vocabulary=read_vocabulary(Path(plan.model.path)),
        admission=admission,
        metrics=metrics,
        timeout=plan.server.timeout_s,
        ranks_per_node=plan.cluster.ranks_per_node,
    )


def _served_model(flight: Preflight) -> ServedModel:
    plan = flight.effective
    folder = Path(plan.model.path)
    decode, prefill = _deployment(flight, "decode"), _deployment(flight, "prefill")
    template = find_template(folder)
    tokenizer = Tokenizer(folder)
    return ServedModel(
        name=plan.server.served_name or folder.name,
        created=int(time.time()),
        tokenizer=tokenizer,
        vocabulary=read_vocabulary(folder),
        template=ChatTemplate(folder, template) if template is not None else None,
        limits=ModelLimits(
            vocab_size=flight.model.vocab_size,
            longest=min(flight.model.max_positions, _kv_tokens(decode)),
            longest_prompt=min(flight.model.max_positions, _kv_tokens(prefill)),
        ),
        max_choices=plan.server.max_choices,
    )


def _deployment(flight: Preflight, role: str) -> EffectiveDeployment:
    """The deployment that plays a role, unified or its own."""
    by_name = flight.effective.by_name
    return by_name["unified"] if "unified" in by_name else by_name[role]


def _kv_tokens(deployment: EffectiveDeployment) -> int:
    """Tokens that a rank caches."""
    return deployment.kv_cache.blocks * deployment.kv_cache.block_tokens


def _keys(variable: str) -> list[str]:
    """Comma-separated keys of an environment variable; PlanError for one that is set and holds none."""
    text = os.environ.get(variable)
    if text is None:
        return []
    keys = [k.strip() for k in text.split(",") if k.strip()]
    if not keys:
        raise PlanError(variable, "is set, and has no key in it", hint="unset it to let everybody in")
    return keys


class _Advisor:
    """What /admin/advice answers: advice for every role, each following from the one before."""

    def __init__(self, flight: Preflight, service: Service) -> None:
        self._policy = Policy(queue_seconds=flight.effective.slo.ttft_ms / 1e3)
        self._board = service.metrics.board
        self._previous: dict[str, Advice] = {}
        self.load_seconds = 0.0

    def advice(self) -> Mapping[str, Any]:
        now, views = time.monotonic(), self._board.ranks()
        for role in dict.fromkeys(v.status.deployment for v in views):
            signals = signals_of(role, views, load_seconds=self.load_seconds)
            self._previous[role] = advise(signals, self._policy, self._previous.get(role), now)
        return {
            role: {
                "replicas": a.replicas,
                "reason": a.reason,
                "since_seconds": round(now - a.since, 1),
                "signals": {
                    name: getattr(a.signals, name)
                    for name in ("replicas", "tokens_in_flight", "queue_seconds", "kv_use", "load_seconds")
                },
            }
            for role, a in self._previous.items()
        }
