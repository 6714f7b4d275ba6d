"""`swiftkv chat` against a gateway: what it prints, what it sends, and the advice in its errors."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import openai
from echo_gateway import Gateway, wait_until
from openai.types import CompletionUsage
from typer.testing import CliRunner, Result

from swiftkv.chat_command import Answer
from swiftkv.cli import app
from tests.support.interruptible import interruptible

PATIENCE_S = 600.0


def run(*arguments: str, typed: str = "", key: str | None = None) -> Result:
    return CliRunner(env={"OPENAI_API_KEY": key, "COLUMNS": "120"}).invoke(app, ["chat", *arguments], input=typed)


def answer_to(gateway: Gateway, *contents: str, system: str | None = None, max_tokens: int = 6) -> Any:
    """Return the answer to the last of these messages, of users and models by turns."""
    roles = ("user", "assistant")
    messages: list[Any] = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client:
        return client.chat.completions.create(model="chat", messages=messages, max_completion_tokens=max_tokens)


def test_one_answer(gateway: Gateway) -> None:
    ask = ("--url", gateway.url, "--max-tokens", "6", "--quick", "Hello over there!")
    for system in (None, "Be brief."):
        said = run(*ask, *(() if system is None else ("--system-prompt", system)))
        assert said.exit_code == 0
        expected = answer_to(gateway, "Hello over there!", system=system).choices[0].message.content
        assert said.stdout == f"{expected}\n"
        assert said.stderr == ""


def test_a_conversation_sends_what_was_said(gateway: Gateway) -> None:
    first, second = "What is it that you said before, and to whom?", "And then?"
    said = run("--url", gateway.url, "--max-tokens", "6", typed=f"{first}\n\n{second}\n")
    assert said.exit_code == 0
    answers = [answer_to(gateway, first)]
    answers.append(answer_to(gateway, first, answers[0].choices[0].message.content, second))
    assert said.stdout == "".join(f"{answer.choices[0].message.content}\n" for answer in answers)
    greeting, *figures = said.stderr.splitlines()
    assert greeting == "chat answers; --model names another: code"
    for line, answer in zip(figures, answers, strict=True):
        assert line.startswith(f"[{answer.usage.prompt_tokens} prompt tokens, ")
        assert "; first token 0." in line
    assert "cached (16 in host memory)" in figures[1]


def test_pieces_that_come_at_once_have_no_pace() -> None:
    usage = CompletionUsage(prompt_tokens=8, completion_tokens=41, total_tokens=49)
    figures = [Answer(usage=usage, sent_s=1.0, first_s=3.0, ended_s=ended_s).figures() for ended_s in (3.001, 5.0)]
    assert figures == [
        "8 prompt tokens, 0 cached; first token 2.00 s, and the others at once",
        "8 prompt tokens, 0 cached; first token 2.00 s, then 20 a second",
    ]


def test_a_refused_message_is_forgotten(gateway: Gateway) -> None:
    said = run("--url", gateway.url, "--max-tokens", "6", typed="refuse me\nHello!\n")
    assert said.exit_code == 0
    assert said.stdout == f"{answer_to(gateway, 'Hello!').choices[0].message.content}\n"
    assert "no such thing" in said.stderr.splitlines()[1]


def test_an_answer_cannot_change_the_terminal(gateway: Gateway) -> None:
    asked = "A \x1b[31mred\x07\x9b2J text"
    answer = answer_to(gateway, asked, max_tokens=40).choices[0].message.content
    assert "\x1b" in answer, "the echo has it"
    said = run("--url", gateway.url, "--max-tokens", "40", "-q", asked)
    assert not set(said.stdout) & {"\x1b", "\x07", "\x9b"}
    assert "[31mred" in said.stdout


def test_bytes_that_are_not_utf8_are_marked(gateway: Gateway) -> None:
    command = [sys.executable, "-m", "swiftkv", "chat", "--url", gateway.url, "--max-tokens", "6"]
    answer = answer_to(gateway, "caf\ufffd au lait").choices[0].message.content
    expected = f"{answer}\n"
    typed = subprocess.run(command, input=b"caf\xe9 au lait\n", capture_output=True, timeout=PATIENCE_S)
    assert (typed.returncode, typed.stdout.decode()) == (0, expected), typed.stderr.decode()
    quick = subprocess.run([*command, "-q", b"caf\xe9 au lait"], capture_output=True, timeout=PATIENCE_S)
    assert (quick.returncode, quick.stdout.decode()) == (0, expected), quick.stderr.decode()


def test_a_closed_standard_input_is_its_end(gateway: Gateway) -> None:
    command = [sys.executable, "-m", "swiftkv", "chat", "--url", gateway.url]
    ended = subprocess.run(["sh", "-c", 'exec "$@" <&-', "sh", *command], capture_output=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr.decode().count("\n")) == (0, b"", 1)


def test_a_wrong_model_and_no_node(gateway: Gateway) -> None:
    wrong = run("--url", gateway.url, "--model", "cod", "-q", "Hello!")
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert wrong.stderr == "swiftkv: no model 'cod'; this node has: chat, code\n"
    typed = run("--url", gateway.url, "--model", "cod", typed="Hello!\n")
    assert (typed.exit_code, typed.stdout, typed.stderr) == (1, "", wrong.stderr)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    nobody = run("--url", url, "-q", "Hello!")
    assert nobody.exit_code == 1
    assert nobody.stderr.startswith(f"swiftkv: no node answers at {url}: ")
    assert "refused" in nobody.stderr


def test_a_key(keyed_gateway: Gateway) -> None:
    ask = ("--url", keyed_gateway.url, "--max-tokens", "3", "-q", "Hello!")
    refused = run(*ask)
    assert refused.exit_code == 1
    assert "export OPENAI_API_KEY=<key>" in refused.stderr
    assert run(*ask, key="api-key").exit_code == 0


def test_a_key_that_no_header_can_carry(gateway: Gateway) -> None:
    refused = run("--url", gateway.url, "-q", "Hello!", key="schlüssel")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert refused.stderr == "swiftkv: the API key in OPENAI_API_KEY is invalid: it has characters that are not ASCII\n"


def test_ctrl_c_stops_an_answer_and_no_more(slow_gateway: Gateway) -> None:
    command = interruptible("chat", "--url", slow_gateway.url)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=os.environ) as talking:
        assert talking.stdin is not None
        assert talking.stdout is not None
        assert talking.stderr is not None
        talking.stdin.write("Tell me everything.\n")
        talking.stdin.flush()
        assert talking.stdout.read(1)
        talking.send_signal(signal.SIGINT)
        assert talking.stderr.readline().startswith("chat answers")
        assert talking.stderr.readline() == "[stopped]\n"
        registry, labels = slow_gateway.metrics.registry, {"model_name": "chat", "engine": "0"}
        wait_until(lambda: registry.get_sample_value("vllm:num_requests_running", labels) == 0)
        talking.stdin.write("refuse me\n")
        talking.stdin.close()
        assert "no such thing" in talking.stderr.readline()
    assert talking.returncode == 0
