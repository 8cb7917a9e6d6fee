"""`moe-runtime generate`: a file of prompts in, a line of tokens and text per prompt out."""

import argparse
import asyncio
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.errors import InputError
from moe_runtime.frontend.experts import Experts
from moe_runtime.frontend.fleet import Fleet
from moe_runtime.frontend.prompts import PromptRequest, prompt_ids, read_prompts
from moe_runtime.frontend.results import GenerateResult, write_logits, write_results
from moe_runtime.launch import session
from moe_runtime.launch.console import say
from moe_runtime.launch.expert_load import dump_expert_load
from moe_runtime.launch.preflight import Preflight
from moe_runtime.launch.progress import Progress
from moe_runtime.spec.requests import FinishReason


def run(arguments: argparse.Namespace, argv: list[str]) -> int:
    command = _Generate(arguments)
    return session.run(
        arguments.plan,
        arguments.overrides,
        argv,
        check=command.check,
        work=command.work,
        inputs={"--prompts": arguments.prompts},
        outputs={
            "--out": arguments.out,
            "--logits": arguments.logits,
            "--dump-expert-load": arguments.dump_expert_load,
        },
        timeline=arguments.timeline_out,
    )


class _Generate:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.prompts: Path = arguments.prompts
        self.out: Path = arguments.out
        self.logits: Path | None = arguments.logits
        self.expert_load: Path | None = arguments.dump_expert_load

    def check(self, flight: Preflight) -> None:
        """Everything wrong with the inputs, before a rank starts."""
        self._requests()
        Tokenizer(Path(flight.effective.model.path))

    def _requests(self) -> list[PromptRequest]:
        return read_prompts(self.prompts, want_logits=self.logits is not None)

    async def work(self, flight: Preflight, fleet: Fleet) -> int:
        tokenizer = Tokenizer(Path(flight.effective.model.path))
        requests = self._requests()
        logits: dict[int, NDArray[np.float32]] = {}
        with Progress("prompts", len(requests)) as progress:

            async def one(request: PromptRequest) -> GenerateResult:
                try:
                    ids = prompt_ids(
                        request,
                        encode=tokenizer.encode,
                        vocab_size=flight.model.vocab_size,
                        max_tokens=flight.model.max_positions,
                    )
                except InputError as error:  # this prompt cannot run; the others can
                    progress.advance()
                    return _result(request, [], "", FinishReason.ERROR, str(error))
                live = fleet.submit(ids, request.sampling)
                await live.done.wait()
                progress.advance()
                if live.logits is not None:
                    logits[request.index] = np.frombuffer(live.logits, np.float32)
                text = tokenizer.decode(live.token_ids)
                return _result(
                    request, live.token_ids, text, live.finish_reason or FinishReason.ERROR, live.error
                )

            results = await asyncio.gather(*(one(r) for r in requests))
        fleet.raise_if_failed()
        if self.expert_load is not None:
            await dump_expert_load(Experts(fleet), self.expert_load)
        write_results(self.out, results)
        if self.logits is not None:
            write_logits(self.logits, logits, vocab_size=flight.model.vocab_size)
        failed = sum(r.error is not None for r in results)
        say(f"wrote {len(results)} results to {self.out}" + (f", {failed} of them errors" if failed else ""))
        return 0


def _result(
    request: PromptRequest, token_ids: list[int], text: str, reason: str, error: str | None
) -> GenerateResult:
    return GenerateResult(
        index=request.index, token_ids=tuple(token_ids), text=text, finish_reason=reason, error=error
    )
