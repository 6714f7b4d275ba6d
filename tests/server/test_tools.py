"""Tools in the prompt: what a client writes into them is text, and half a character is a mistake."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from swiftkv.server.errors import ApiError
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tools import ToolCallMessage
from tests.support.checkpoints import make_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for message in messages %}<|{{ message.role }}|>"
    "{{ message.content }}{{ message.tool_calls | tojson if message.tool_calls }}<|end|>{% endfor %}"
)


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
