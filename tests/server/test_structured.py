"""Grammars are checked before an engine hears of them: a wrong or hostile one is a 400 that names its field."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop
from echo_gateway import Gateway

from swiftkv.grammars import GrammarSource, library_form
from swiftkv.server.errors import ApiError
from swiftkv.server.grammars import AskedGrammar, GrammarChecker
from swiftkv.server.tenants import ANYBODY
from tests.support.schemas import DEEP, HOSTILE, SCHEMAS

COMPLETION: dict[str, Any] = {"model": "chat", "prompt": "hello", "max_tokens": 1}
CHAT: dict[str, Any] = {"model": "chat", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
PERSON = SCHEMAS["person"]
SCHEMA = {"name": "a", "schema": PERSON}
GUIDANCE = '%llguidance {}\n\nstart: s\ns[capture]: S\n\nS: "a"\n     | "b"\n\n'
"""A grammar of the guidance library, which sends it under vLLM's older and newer name."""


def post(gateway: Gateway, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    with gateway.http() as http:
        response = http.post(path, json=body)
    return response.status_code, response.json().get("error", {})


def asked(kind: Any, text: str) -> AskedGrammar:
    return AskedGrammar("guided_grammar", GrammarSource(kind, text))


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PERSON, "strict": True}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "description": "b"}}},
        {"structured_outputs": {"json": PERSON, "whitespace_pattern": "[ ]?"}},
        {"structured_outputs": {"json": json.dumps(PERSON), "disable_any_whitespace": True}},
        {"structured_outputs": {"json": True}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"regex": "[a-z]+"}},
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
        {"guided_json": PERSON, "guided_whitespace_pattern": " ?", "guided_decoding_backend": "auto"},
        {"guided_regex": "[a-z]+"},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": 'root ::= "a" | "b"'},
        {
            "structured_outputs": {"grammar": GUIDANCE},
            "guided_grammar": GUIDANCE,
            "guided_decoding_backend": "guidance",
        },
        {"response_format": {"type": "text"}, "ignore_eos": True},
        {"structured_outputs": {}},
        # The values that vLLM's own clients send for what they leave out.
        {"response_format": {"type": "json_object", "json_schema": None}},
        {"response_format": {"type": "text", "json_schema": None}},
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": False, "whitespace_pattern": None}},
        {"structured_outputs": {"json": PERSON, "disable_any_whitespace": False, "whitespace_pattern": " ?"}},
        {"guided_regex": "a", "guided_whitespace_pattern": None},
    ],
    ids=lambda fields: json.dumps(fields)[:40],
)
@pytest.mark.parametrize("body", [COMPLETION, CHAT], ids=["completion", "chat"])
def test_every_form_of_asking_is_taken(gateway: Gateway, body: dict[str, Any], fields: dict[str, Any]) -> None:
    assert post(gateway, {**body, **fields}) == (200, {})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": SCHEMA}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "json_schema": SCHEMA}}, "response_format.json_schema"),
        (
            {"structured_outputs": {"regex": "[ab]+", "whitespace_pattern": "x"}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"choice": ["a"], "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " ?"}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_regex": "a", "guided_whitespace_pattern": " ?"}, "guided_whitespace_pattern"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "str"}}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a"] * 1025}, "guided_choice"),
        ({"guided_json": DEEP}, "guided_json"),
        ({"guided_json": {"enum": list(range(20_000))}}, "guided_json"),
        ({"guided_json": {"enum": ["x" * (1 << 20)]}}, "guided_json"),
        ({"guided_regex": "a" * (1 << 20)}, "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_names_its_field(gateway: Gateway, fields: dict[str, Any], param: str) -> None:
    status, error = post(gateway, {**COMPLETION, **fields})
    assert (status, error["param"]) == (400, param)
    assert param in error["message"]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def checker(loop: asyncio.AbstractEventLoop) -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    yield checker
    loop.run_until_complete(checker.close())


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_refused_and_the_next_one_taken(
    loop: asyncio.AbstractEventLoop, checker: GrammarChecker, name: str
) -> None:
    with pytest.raises(ApiError) as refused:
        loop.run_until_complete(checker.check(asked(*HOSTILE[name]), ANYBODY))
    assert (refused.value.status, refused.value.param) == (400, "guided_grammar")
    assert len(refused.value.message) > len("field 'guided_grammar': ")
    assert loop.run_until_complete(checker.check(asked("regex", name.replace(" ", "_")), ANYBODY))


def test_every_real_schema_is_taken(loop: asyncio.AbstractEventLoop, checker: GrammarChecker) -> None:
    for schema in SCHEMAS.values():
        source = GrammarSource("json", json.dumps(schema))
        assert loop.run_until_complete(checker.check(AskedGrammar("guided_json", source), ANYBODY)) == library_form(
            source
        )


def test_a_grammar_that_ends_its_process_is_refused_for_good(loop: asyncio.AbstractEventLoop) -> None:
    async def run() -> None:
        checker = GrammarChecker()
        assert await checker.check(asked("regex", "a"), ANYBODY)
        (process,) = processes()
        process.suspend()
        checks = [
            asyncio.create_task(checker.check(asked("regex", "b"), ANYBODY)) for _ in range(3)
        ]  # one check for all three
        for _ in range(10):  # more turns of the loop than it takes to send the process its work
            await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        for check in checks:
            with pytest.raises(ApiError, match="SIGKILL"):
                await check
        assert await checker.check(asked("regex", "c"), ANYBODY)
        with pytest.raises(ApiError, match="SIGKILL"):
            await checker.check(asked("regex", "b"), ANYBODY)
        await checker.close()
        assert processes() == []

    def processes() -> list[psutil.Process]:
        found = []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "swiftkv.server.grammar_child" in child.cmdline():
                    found.append(child)
        return [child for child in found if child.pid not in others]

    others: set[int] = set()
    others = {child.pid for child in processes()}
    loop.run_until_complete(run())


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_process_that_was_killed_while_it_had_nothing_to_do_is_replaced(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def run() -> None:
        checker = GrammarChecker()
        before = {child.pid for child in psutil.Process().children()}
        assert await checker.check(asked("regex", "a"), ANYBODY)
        [process] = [child for child in psutil.Process().children() if child.pid not in before]
        for pattern in ("b", "c"):
            process.kill()
            with suppress(ChildProcessError):  # a thread of the loop may wait for it sooner
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            assert await checker.check(asked("regex", pattern), ANYBODY)
            [process] = [child for child in psutil.Process().children() if child.pid not in before]
        await checker.close()

    loop = new_loop()
    loop.run_until_complete(run())
    loop.close()


def test_grammars_are_checked_wherever_the_node_was_started(
    loop: asyncio.AbstractEventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        checker = GrammarChecker()
        assert await checker.check(asked("regex", "a"), ANYBODY)
        await checker.close()

    directory = tmp_path / "here"
    directory.mkdir()
    module = directory / "asyncio.py"
    module.write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(directory)
    loop.run_until_complete(check())
    module.unlink()
    directory.rmdir()
    loop.run_until_complete(check())


def test_too_many_grammars_at_once_are_refused(loop: asyncio.AbstractEventLoop) -> None:
    async def run() -> list[int]:
        checker = GrammarChecker()
        checks = [checker.check(asked("regex", f"a{{{number}}}"), ANYBODY) for number in range(80)]
        results = await asyncio.gather(*checks, return_exceptions=True)
        await checker.close()
        return [result.status if isinstance(result, ApiError) else 200 for result in results]

    assert loop.run_until_complete(run()) == [200] * 65 + [429] * 15
