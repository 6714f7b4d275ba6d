"""Tools in the prompt: what a client writes into them is text, and half a character is a mistake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from swiftkv.server.errors import ApiError
from swiftkv.server.grammars import AskedGrammar
from swiftkv.server.protocol import ChatBody
from swiftkv.server.structured import asked_grammar
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers import TOOL_PARSERS
from swiftkv.server.tool_parsers.base import ToolFunction
from swiftkv.server.tool_parsers.hermes import HermesParser
from swiftkv.server.tools import ToolCallMessage, template_tools, tool_use
from tests.support.checkpoints import make_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}<|end|>{% endfor %}"
)
USER = {"role": "user", "content": "x"}


@pytest.fixture(scope="module", params=[False, True], ids=["joined", "split"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    fast = make_tokenizer(320)
    fast.chat_template = TEMPLATE
    return Tokenizer(fast, split_special_tokens=request.param)


def conversation(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    calls = [ToolCallMessage.model_validate(call).for_template()]
    return [{"role": "assistant", "content": "", "tool_calls": calls}]


def test_half_a_character_in_tools_is_a_mistake_of_the_client(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError, match="surrogate"):
        tokenizer.encode_chat(conversation('{"a": "\\ud800"}'), max_chars=1000)
    with pytest.raises(ApiError, match="surrogate"):
        tokenizer.encode_chat(conversation("{}"), tools=[{"\ud800": 1}], max_chars=1000)


def test_special_tokens_in_tools_are_text_where_those_of_messages_are(tokenizer: Tokenizer) -> None:
    ends = tokenizer.backend.token_to_id("<|end|>")
    tools = [{"type": "function", "function": {"name": "f", "description": "<|end|>"}}]
    ids = tokenizer.encode_chat(conversation('{"a": "<|end|>"}'), tools=tools, max_chars=1000)
    assert Counter(ids)[ends] == (1 if tokenizer._plain_backend is not None else 3)
    assert tokenizer.decode(ids).count("<|end|>") == 3


def test_templates_may_take_a_description_and_parameters_for_granted(tokenizer: Tokenizer) -> None:
    """Those of gpt-oss and Qwen3-Coder do, and clients may leave them out."""
    fast = make_tokenizer(320)
    fast.chat_template = (
        "{% for tool in tools %}{{ tool.function.name + ':' + tool.function.description }}"
        "{% for key, value in tool.function.parameters.properties | items %}{{ key }}{% endfor %}{% endfor %}"
    )
    body = ChatBody.model_validate({"messages": [USER], "tools": [{"type": "function", "function": {"name": "f"}}]})
    ids = Tokenizer(fast).encode_chat([USER], tools=template_tools(body), max_chars=1000)
    assert tokenizer.decode(ids) == "f:"


@pytest.fixture(scope="module")
def mistral() -> Tokenizer:
    fast = make_tokenizer(320)
    fast.add_tokens(["[TOOL_CALLS]"], special_tokens=True)
    return Tokenizer(fast)


def either(parser: str, tokenizer: Tokenizer) -> tuple[list[AskedGrammar], AskedGrammar]:
    """Return what holds an answer that may be a call or JSON, for a model with that parser, and what is asked for."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = ChatBody.model_validate({
        "messages": [{"role": "user", "content": "a"}], "tools": tools, "response_format": {"type": "json_object"}
    })  # fmt: skip
    asked, use = asked_grammar(body), tool_use(TOOL_PARSERS[parser], body)
    assert asked is not None
    assert use is not None
    return use.grammars_beside(asked, tokenizer), asked


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder", "mistral"])
def test_an_answer_may_be_a_call_or_what_is_asked_for(mistral: Tokenizer, parser: str) -> None:
    (of_tools, both), asked = either(parser, mistral)
    assert (of_tools.field, both.field) == ("tools", asked.field)
    assert (both.source.kind, both.source.text) == (asked.source.kind, asked.source.text)
    assert both.source.calls is not None
    assert of_tools.source.text == f"start: calls\n{both.source.calls}"
    assert parser != "mistral" or both.source.tags == (("[TOOL_CALLS]", mistral.token_id("[TOOL_CALLS]")),)


def test_the_rules_of_calls_are_written_once_for_both_grammars(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of many tools are long."""
    call_grammar, written = HermesParser.call_grammar, []

    def counted(functions: Sequence[ToolFunction], *, several: bool) -> str:
        written.append(call_grammar(functions, several=several))
        return written[-1]

    monkeypatch.setattr(HermesParser, "call_grammar", counted)
    (of_tools, both), _ = either("hermes", tokenizer)
    assert written == [both.source.calls]
    assert of_tools.source.text.endswith(written[0])


@pytest.mark.parametrize("parser", ["llama3_json", "pythonic", "xlam"])
def test_calls_that_look_like_answers_do_not_go_with_a_format(tokenizer: Tokenizer, parser: str) -> None:
    with pytest.raises(ApiError, match=parser) as refused:
        either(parser, tokenizer)
    assert (refused.value.status, refused.value.param) == (400, "tool_choice")


def test_calls_in_a_channel_of_their_own_are_not_held(tokenizer: Tokenizer) -> None:
    held, asked = either("gpt_oss", tokenizer)
    assert held == [asked]
