"""From a parsed request to orders and a form: what its outputs are, and how they are told.

Everything a request can be refused for is found here, before a rank hears of it. Pure, and slow for
long prompts: tokenising takes its time.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from moe_runtime.checkpoint.tokenizer import Tokenizer
from moe_runtime.errors import InputError
from moe_runtime.frontend.openai.answers import AnswerForm
from moe_runtime.frontend.openai.chat import ChatRequest, check_chat, structure_of, template_messages
from moe_runtime.frontend.openai.completions import DEFAULT_MAX_TOKENS, CompletionRequest
from moe_runtime.frontend.openai.errors import ApiError, invalid
from moe_runtime.frontend.openai.forms import ChatForm, CompletionForm, Echo, Form, Header
from moe_runtime.frontend.openai.logprobs import LogprobFormat
from moe_runtime.frontend.openai.sampling import (
    ModelLimits,
    OutputWishes,
    check_ids,
    check_prompt_ids,
    new_seed,
    sampling_params,
    seed_of,
)
from moe_runtime.frontend.openai.schema import SamplingFields
from moe_runtime.frontend.server.service import Order
from moe_runtime.frontend.text import reasoning
from moe_runtime.frontend.text.chat_template import ChatPrompt, ChatTemplate
from moe_runtime.frontend.text.tool_parsers import parser_for
from moe_runtime.frontend.text.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model that clients talk to. `template`: None for a checkpoint that brings none."""

    name: str
    created: int
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    template: ChatTemplate | None
    limits: ModelLimits
    max_choices: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """`orders` are the outputs in order of their choices."""

    orders: Sequence[Order]
    form: Form


def prepare_completion(model: ServedModel, request: CompletionRequest) -> Prepared:
    """Raises ApiError for whatever cannot be served."""
    _common_checks(model, request)
    if request.max_tokens == 0 and not request.echo:
        invalid("max_tokens", "0 asks for nothing, unless the prompt is wanted with echo")
    prompts = request.prompts
    copies = _copies(model, request, len(prompts))
    several = len(prompts) > 1
    ids = []
    for i, prompt in enumerate(prompts):
        found = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        where = f"prompt[{i}]" if several else "prompt"
        check_prompt_ids(found, where, model.limits, least_output=0 if request.max_tokens == 0 else 1)
        ids.append(found)
    wishes = OutputWishes(
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        max_tokens_field="max_tokens",
        logprobs=-1 if request.logprobs is None else request.logprobs,
        structure=None,
        scored=bool(request.echo) and request.logprobs is not None,
    )
    echo = [
        Echo(text=p, spelled=True) if isinstance(p, str) else Echo(text=model.tokenizer.decode(p))
        for p in (prompts if request.echo else ())
    ]
    form = CompletionForm(
        _header("cmpl", model, request),
        LogprobFormat(model.vocabulary) if request.logprobs is not None else None,
        copies=copies,
        echo=echo,
    )
    return Prepared(orders=_orders(model, request, ids, copies, wishes), form=form)


def prepare_chat(model: ServedModel, request: ChatRequest) -> Prepared:
    """Raises ApiError for whatever cannot be served."""
    _common_checks(model, request)
    check_chat(request)
    copies = _copies(model, request, 1)
    if model.template is None:
        raise ApiError(
            400,
            f"model: the checkpoint of {model.name!r} has no chat template; use /v1/completions",
            param="model",
            code="no_chat_template",
        )
    answers, prompt = _rendered(model.template, request)
    check_prompt_ids(prompt.token_ids, "messages", model.limits)
    newer = request.max_completion_tokens is not None
    wishes = OutputWishes(
        max_tokens=request.max_completion_tokens if newer else request.max_tokens,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        logprobs=(request.top_logprobs or 0) if request.logprobs else -1,
        structure=structure_of(request),
    )
    form = ChatForm(
        _header("chatcmpl", model, request),
        LogprobFormat(model.vocabulary) if request.logprobs else None,
        copies=copies,
        answers=answers,
    )
    return Prepared(orders=_orders(model, request, [prompt.token_ids], copies, wishes), form=form)


def _common_checks(model: ServedModel, request: SamplingFields) -> None:
    check_model(model, request.model)
    check_ids(request, model.limits)


def check_model(model: ServedModel, name: str | None) -> None:
    """ApiError 404 for another model than the one that is served."""
    if name is not None and name != model.name:
        message = f"model: {name!r} is not served here, {model.name!r} is"
        raise ApiError(404, message, param="model", code="model_not_found")


def _copies(model: ServedModel, request: SamplingFields, prompts: int) -> int:
    copies = request.n or 1
    if copies * prompts > model.max_choices:
        invalid("n", f"{prompts} prompts x {copies} outputs are over the {model.max_choices} of a request")
    return copies


def _orders(
    model: ServedModel,
    request: SamplingFields,
    prompts: Sequence[list[int]],
    copies: int,
    wishes: OutputWishes,
) -> list[Order]:
    seed = new_seed(request)
    orders = []
    for ids in prompts:
        for copy in range(copies):
            sampling = sampling_params(
                request,
                wishes,
                prompt_tokens=len(ids),
                limits=model.limits,
                seed=seed_of(seed, copy),
            )
            orders.append(Order(prompt=ids, sampling=sampling, stop=request.stops))
    return orders


def _rendered(template: ChatTemplate, request: ChatRequest) -> tuple[AnswerForm, ChatPrompt]:
    """The prompt, and how the outputs that follow it are to be read."""
    make_parser = parser_for(template.text)
    if request.choice == "auto" and make_parser is None:
        invalid("tools", "the model's chat template shows no form of tool calls that is known here")
    try:
        prompt = template.render(
            template_messages(request),
            tools=[t.model_dump(exclude_none=True) for t in request.offered_tools],
            options=request.chat_template_kwargs,
        )
    except InputError as error:
        raise ApiError(400, f"messages: {error}", param="messages", code="template_error") from None
    if request.choice == "required":
        return AnswerForm(form="required"), prompt
    if request.forced:
        return AnswerForm(form="named", name=request.choice), prompt
    # A constrained output is all answer: it has no room for reasoning.
    free = structure_of(request) is None
    return AnswerForm(
        reasoning=prompt.reasoning_open if free and reasoning.thinks(template.text) else None,
        make_parser=make_parser if request.choice == "auto" else None,
    ), prompt


def _header(kind: str, model: ServedModel, request: SamplingFields) -> Header:
    return Header(id=f"{kind}-{secrets.token_hex(12)}", model=model.name, include_usage=request.include_usage)
