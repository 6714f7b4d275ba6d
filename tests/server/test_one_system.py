"""Conversations with several system messages, for templates that show only the first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from echo_gateway import TEMPLATE, train_tokenizer

from swiftkv.server.one_system import one_system
from swiftkv.server.tokenizer import Tokenizer

SYSTEM, USER, ASSISTANT, TOOL = ({"role": role, "content": role[0]} for role in ("system", "user", "assistant", "tool"))
LATE = "<system-reminder>\ns\n</system-reminder>"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% if m.role == 'user' and not loop.first and loop.previtem.role == 'user' %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def texts(messages: Any) -> list[str]:
    return [f"{message['role']}:{message['content']}" for message in one_system(messages)]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, USER], ["system:s", "user:u"]),
        ([SYSTEM, SYSTEM, USER], ["system:s\n\ns", "user:u"]),
        ([USER, SYSTEM], [f"user:u\n\n{LATE}"]),
        ([SYSTEM, USER, SYSTEM, SYSTEM], ["system:s", f"user:u\n\n{LATE}\n\n{LATE}"]),
        ([USER, ASSISTANT, SYSTEM, USER], ["user:u", "assistant:a", f"user:{LATE}\n\nu"]),
        ([USER, ASSISTANT, TOOL, SYSTEM], ["user:u", "assistant:a", "tool:t", f"user:{LATE}"]),
        ([USER, USER], ["user:u", "user:u"]),  # which nobody asked to join
    ],
)
def test_only_the_first_message_is_a_system_message(messages: Any, expected: list[str]) -> None:
    assert texts(messages) == expected


def test_messages_stay_as_they_were() -> None:
    messages = [dict(USER), dict(SYSTEM)]
    one_system(messages)
    assert messages == [USER, SYSTEM]


def prompt(directory: Path, template: str) -> str:
    train_tokenizer(directory, template=template)
    tokenizer = Tokenizer.from_pretrained(directory)
    return tokenizer.decode(tokenizer.encode_chat([SYSTEM, SYSTEM, USER, SYSTEM], max_chars=1000))


def test_a_template_that_refuses_late_messages_gets_none(tmp_path: Path) -> None:
    assert prompt(tmp_path, ONE_SYSTEM) == f"system:s\n\ns;user:u\n\n{LATE};assistant:"


def test_a_template_that_leaves_them_out_gets_none(tmp_path: Path) -> None:
    silent = ONE_SYSTEM.replace("{{ raise_exception('System message must be at the beginning.') }}", "{% continue %}")
    assert LATE in prompt(tmp_path, silent)


def test_a_template_that_shows_them_is_given_them(tmp_path: Path) -> None:
    written = prompt(tmp_path, TEMPLATE)
    assert written.count("<|im_start|>system") == 3
    assert "reminder" not in written
