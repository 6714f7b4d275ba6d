"""A request that an engine has begun to answer, of any protocol, and the choices that decode its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from swiftkv.server.choices import Choice
from swiftkv.server.generation import Generation
from swiftkv.server.models import ModelHandle
from swiftkv.server.protocol import ChatBody, CompletionBody
from swiftkv.server.reasoning import Sections
from swiftkv.server.sampling import stop_rules
from swiftkv.server.text_tokens import TextTokens
from swiftkv.server.tools import tool_use

BodyT_co = TypeVar("BodyT_co", bound=CompletionBody | ChatBody, covariant=True)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as token ids, with its text if the answer repeats it (`echo`)."""

    token_ids: list[int]
    text: str = ""


@dataclass(frozen=True, slots=True)
class BegunRequest(Generic[BodyT_co]):
    """A request that an engine has begun to answer.

    Attributes:
        request_id: The answer's `X-Request-Id`; the id in its body ends with it, as vLLM's does.
        choices: One for each sequence, those of one prompt next to each other.
    """

    request_id: str
    model: ModelHandle
    body: BodyT_co
    prompts: Sequence[Prompt]
    choices: Sequence[Choice]
    generation: Generation


def make_choices(
    model: ModelHandle, body: CompletionBody | ChatBody, prompts: Sequence[Prompt], *, is_held: bool
) -> list[Choice]:
    """Return the choices that decode the sequences, those of one prompt next to each other.

    `is_held`: whether a grammar constrains their texts.
    """
    n = body.n or 1
    rules = stop_rules(body)
    if isinstance(body, CompletionBody):
        return [
            Choice(index, prompts[index // n].token_ids, model.tokenizer, rules) for index in range(len(prompts) * n)
        ]
    tools = tool_use(model.tool_parser, body, is_held=is_held)
    prompt_ids = prompts[0].token_ids
    finds_text = bool(body.logprobs) and body.logprobs_of_text
    return [
        Choice(
            index,
            prompt_ids,
            model.tokenizer,
            rules,
            tools,
            _sections(model, body, prompt_ids),
            TextTokens() if finds_text else None,
        )
        for index in range(n)
    ]


def _sections(model: ModelHandle, body: ChatBody, prompt_ids: Sequence[int]) -> Sections | None:
    if model.reasoning is None:
        return None
    return model.reasoning.sections(prompt_ids, continues=bool(body.continue_final_message))
