"""The fields of a chat that are about its template: how the messages become a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Field

from swiftkv.server.errors import ApiError
from swiftkv.server.fields import AtMost, Body
from swiftkv.server.price import LIMITS, check_template_variables

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
TemplateVariables = Annotated[
    dict[str, Any], Field(max_length=LIMITS.template_variables), BeforeValidator(AtMost(LIMITS.template_variables))
]


class TemplateFields(Body):
    chat_template_kwargs: TemplateVariables | None = Field(None, description="Variables of the chat template")
    add_generation_prompt: bool | None = Field(None, description="Default: true, unless a message is continued")
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Field(max_length=LIMITS.template_chars)] | None = Field(
        None, description="Only where `models[].trust_request_chat_template` allows it, and not in `/tokenize`"
    )


@dataclass(frozen=True, slots=True)
class Templating:
    """The input of a chat template besides messages and tools."""

    add_generation_prompt: bool = True
    continues: bool = False  # the last message, which is left open
    variables: Mapping[str, Any] = field(default_factory=dict)


def templating(body: TemplateFields, chat_template: str, reasoning_effort: ReasoningEffort | None = None) -> Templating:
    """Return a request's input for `chat_template` besides messages and tools.

    Raises:
        ApiError: 400 for fields that exclude each other or are too large.
    """
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        message = (
            "field 'continue_final_message' goes on with the last message, but 'add_generation_prompt' begins another: "
            "give one"
        )
        raise ApiError(400, message, param="continue_final_message")
    variables = dict(body.chat_template_kwargs or {})
    if variables:
        try:
            num_bytes = len(msgspec.json.encode(variables))
        except UnicodeEncodeError:
            message = "field 'chat_template_kwargs' has a lone surrogate, which is not valid Unicode"
            raise ApiError(400, message, param="chat_template_kwargs") from None
        check_template_variables(num_bytes)
    if reasoning_effort is not None:
        variables = _of_effort(reasoning_effort, chat_template) | variables
    add_generation_prompt = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return Templating(add_generation_prompt, continues, variables)


def _of_effort(effort: ReasoningEffort, chat_template: str) -> dict[str, Any]:
    """Return the variables that pass an effort to the template: none if it takes none, as clients set it once."""
    if "reasoning_effort" in chat_template:
        return {"reasoning_effort": "xhigh" if effort == "max" else effort}
    if "enable_thinking" in chat_template:
        return {"enable_thinking": effort != "none"}
    return {}
