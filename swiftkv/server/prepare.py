"""The way from a body to an answer that an engine has begun, for clients' requests and for lines of batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from swiftkv.server.answer import Answer, ChatAnswer, CompletionAnswer
from swiftkv.server.begun import BegunRequest, Prompt, make_choices
from swiftkv.server.choices import Choice
from swiftkv.server.errors import ApiError
from swiftkv.server.generation import SequenceRequest, Terms
from swiftkv.server.grammars import AskedGrammar
from swiftkv.server.models import ModelHandle
from swiftkv.server.price import check_detokenize, check_messages, check_stops, max_tokenize_chars
from swiftkv.server.protocol import ChatBody, ChatMessage, CompletionBody
from swiftkv.server.sampling import check_grammar_fields, sequence_requests, truncation
from swiftkv.server.structured import asked_grammar, asks_for_grammar
from swiftkv.server.targets import NO_TARGETS, Targets
from swiftkv.server.templating import templating
from swiftkv.server.tiers import priority_in, tier_of
from swiftkv.server.tools import template_tools, tool_use
from swiftkv.server.truncation import Truncation


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request, tokenized and priced."""

    prompts: list[Prompt]
    sequences: list[SequenceRequest]
    choices: list[Choice]


def check(model: ModelHandle, body: CompletionBody | ChatBody, targets: Targets = NO_TARGETS) -> None:
    """Make the checks of a request that cost nothing.

    Raises:
        ApiError: 503 unless the engine takes requests, 400 for a field that is not taken or a model of another task,
            429 if no prompt of this length can meet the targets.
    """
    model.check_task("generate")
    check_admission(model, body.priority)
    check_stops(body.stops)
    sender = model.policy.sender
    model.client.outlook.refuse_unread(_least_tokens(model, body), _priority(model, body), targets, sender)


def check_admission(model: ModelHandle, priority: int | None) -> None:
    """Raise `ApiError` 503 unless the engine takes requests, 400 for a priority where clients may not set one."""
    model.client.check_available()
    if priority and not model.policy.allow_priority:
        raise ApiError(
            400,
            "field 'priority' is not allowed here: leave it out, or set node.allow_priority, or the tenant's "
            "max_service_tier to priority",
            param="priority",
        )


def wanted_targets(model: ModelHandle, body: CompletionBody | ChatBody, asked: Targets) -> Targets:
    """Return the targets of a request: those that it asks for, or else its model's.

    A model's own targets do not apply to requests that may wait (`flex`, `batch`). Its `target_tpot` refuses no request
    while nothing else runs: otherwise a model that is slower than its own target would serve nobody.
    """
    if tier_of(body.service_tier, model.policy.max_tier) in ("flex", "batch"):
        return asked
    usual = model.targets if model.client.num_in_flight else Targets(model.targets.ttft_s)
    return asked.or_else(usual)


def _priority(model: ModelHandle, body: CompletionBody | ChatBody) -> int:
    return priority_in(tier_of(body.service_tier, model.policy.max_tier), body.priority or 0)


def _least_tokens(model: ModelHandle, body: CompletionBody | ChatBody) -> int:
    """Return the fewest tokens of the first prompt, of which a chat template or a cut may leave out most."""
    if isinstance(body, ChatBody) or body.truncate_prompt_tokens is not None:
        return 1
    prompt = body.prompts[0]
    return model.tokenizer.least_tokens(len(prompt)) if isinstance(prompt, str) else len(prompt)


async def prepare(model: ModelHandle, body: CompletionBody | ChatBody, num_bytes: int) -> Prepared:
    """Check the grammar of a request, tokenize its prompts, and compute what it costs. The body had `num_bytes`.

    Raises:
        ApiError: 400 if a field does not fit the model, the grammar is invalid, or the request costs too much; 429 if
            too many others wait for the same.
    """
    grammar = await _checked_grammar(model, body, num_bytes)
    rendered = await _rendered(model, body, num_bytes) if isinstance(body, ChatBody) else None
    return await model.in_threads(lambda: _prepared(model, body, grammar, rendered), num_bytes)


async def _rendered(model: ModelHandle, body: ChatBody, num_bytes: int) -> str | None:
    """Return the messages as the request's own chat template renders them, `None` if it brings none."""
    template = body.chat_template
    if template is None:
        return None
    if model.templates is None:
        message = (
            "field 'chat_template' is not supported: this model takes no templates from requests; to allow them, set "
            "models[].trust_request_chat_template"
        )
        raise ApiError(400, message, param="chat_template", code="unsupported_field")
    source = await model.in_threads(
        lambda: model.tokenizer.template_source(
            template,
            conversation(body.messages),
            max_chars=_max_chars(model, truncation(model, body)),
            tools=template_tools(body),
            given=templating(body, template, body.reasoning_effort),
        ),
        num_bytes,
    )
    return await model.templates.render(source, model.policy.sender)


async def _checked_grammar(model: ModelHandle, body: CompletionBody | ChatBody, num_bytes: int) -> str | None:
    """Return the grammar that is to constrain the answer, as engines take it."""
    if not asks_for_grammar(body) and not (isinstance(body, ChatBody) and body.tools):
        return None
    grammars = await model.in_threads(lambda: _asked_grammars(model, body), num_bytes)
    if not grammars:
        return None
    check_grammar_fields(body)
    checked = [await model.grammars.check(asked, model.policy.sender) for asked in grammars]
    return checked[-1]


def _asked_grammars(model: ModelHandle, body: CompletionBody | ChatBody) -> list[AskedGrammar]:
    """Return the grammars of a request that are to be checked; the last of them constrains its answer."""
    asked = asked_grammar(body)
    tools = tool_use(model.tool_parser, body) if isinstance(body, ChatBody) else None
    if tools is None or (asked is None and not tools.must_call):
        return [] if asked is None else [asked]
    if asked is None:
        return [tools.grammar(model.tokenizer)]
    if not tools.must_call:
        return tools.grammars_beside(asked, model.tokenizer)
    if body.response_format is not None:  # it is for text, and the answer is calls; agents send both in every turn
        return [tools.grammar(model.tokenizer)]
    message = f"field 'tool_choice' asks for a call, but field '{asked.field}' for another answer: give one"
    raise ApiError(400, message, param="tool_choice")


def _prepared(
    model: ModelHandle, body: CompletionBody | ChatBody, grammar: str | None, rendered: str | None
) -> Prepared:
    prompts = [_chat_prompt(model, body, rendered)] if isinstance(body, ChatBody) else _completion_prompts(model, body)
    sequences = sequence_requests(model, body, [prompt.token_ids for prompt in prompts], grammar)
    return Prepared(prompts, sequences, make_choices(model, body, prompts, is_held=grammar is not None))


AnswerMaker = Callable[[BegunRequest[Any]], Answer]
"""Makes the answer to a request whose body is of a type that it knows."""


def begin(
    model: ModelHandle,
    body: CompletionBody | ChatBody,
    prepared: Prepared,
    request_id: str,
    *,
    make_answer: AnswerMaker | None = None,
    targets: Targets = NO_TARGETS,
    is_traced: bool = False,
) -> Answer:
    """Hand the sequences of a request to the engine. The caller closes the answer's generation.

    Args:
        request_id: The end of the answer's id.
        make_answer: For a chat that was asked for in another protocol.

    Raises:
        ApiError: 503 if the engine is down, 429 if too much is in flight or the targets cannot be met.
    """
    policy = model.policy
    terms = Terms(
        cache_salt=policy.sender.salt(body.cache_salt),
        priority=_priority(model, body),
        target_ttft_s=targets.ttft_s if policy.allow_priority else None,
        targets=targets,
        sender=policy.sender,
        is_traced=is_traced,
        is_to_last=body.prompt_cache_retention == "24h",
    )
    generation = model.client.generate(prepared.sequences, terms)
    model.client.metrics.observe_n(body.n or 1)
    usual: AnswerMaker = ChatAnswer if isinstance(body, ChatBody) else CompletionAnswer
    return (make_answer or usual)(BegunRequest(request_id, model, body, prepared.prompts, prepared.choices, generation))


def conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates expect them.

    Raises:
        ApiError: 400 for a message without content.
    """
    check_messages(sum(message.num_parts for message in messages))
    for index, message in enumerate(messages):
        if not message.says_something:
            field = f"messages.{index}.content"
            raise ApiError(
                400,
                f"field '{field}' is required unless the message has 'tool_calls' or 'reasoning_content'",
                param=field,
                code="missing_field",
            )
    return [message.for_template() for message in messages]


def _completion_prompts(model: ModelHandle, body: CompletionBody) -> list[Prompt]:
    cut = truncation(model, body)
    for text in body.prompts:
        if isinstance(text, str):
            model.tokenizer.refuse_hopeless(len(text), model.max_model_len, "prompt", cut)
    return [_completion_prompt(model, body, prompt, cut) for prompt in body.prompts]


def _completion_prompt(
    model: ModelHandle, body: CompletionBody, prompt: str | list[int], cut: Truncation | None
) -> Prompt:
    add_special_tokens = body.add_special_tokens is not False
    if isinstance(prompt, list):
        ids = prompt if cut is None else cut.cut(prompt)
    else:
        ids = model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, cut=cut)
        if cut is None:
            return Prompt(ids, prompt)
    if not body.echo:
        return Prompt(ids)
    check_detokenize(len(ids), model.max_model_len)
    return Prompt(ids, model.tokenizer.decode(ids))


def _chat_prompt(model: ModelHandle, body: ChatBody, rendered: str | None) -> Prompt:
    cut = truncation(model, body)
    max_chars = _max_chars(model, cut)
    if rendered is not None:
        ids = model.tokenizer.encode_rendered(rendered, max_chars=max_chars)
    else:
        messages = conversation(body.messages)
        given = templating(body, model.tokenizer.chat_template, body.reasoning_effort)
        ids = model.tokenizer.encode_chat(messages, tools=template_tools(body), max_chars=max_chars, given=given)
    return Prompt(ids if cut is None else cut.cut(ids))


def _max_chars(model: ModelHandle, cut: Truncation | None) -> int:
    """Return the most characters of a rendered conversation. (A template may leave out parts of its messages.)"""
    max_len = model.max_model_len
    return model.tokenizer.max_chars(max_len) if cut is None else max_tokenize_chars(max_len)
