"""`make demo`: starts a node, talks to each of its models through the openai client, and stops it.

The table shows what the node is for: from the second turn on most of the prompt comes from the KV cache, and the
first token comes as fast as if the conversation were short.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import httpx
import openai
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swiftkv.config import Config, ModelConfig, load_config
from swiftkv.errors import ConfigError, EngineError

_START_TIMEOUT_S = 300.0
_POLL_S = 0.2
_MAX_TOKENS = 64

QUESTIONS = (
    "Hello!",
    "What is swiftkv?",
    "What does os.path.join do?",
    "How do I call it?",
    "And what is json.dumps for?",
    "Can you repeat that?",
    "Thanks!",
)
# A model named code is given a file that grows: what it wrote stays, and the next lines follow.
PROGRAM = (
    "import os\nimport sys\n\n\ndef is_file(path):\n    try:\n",
    "\n\n\nclass Stack:\n    def __init__(self):\n        self._items = []\n\n"
    "    def push(self, item):\n        self._items.append(",
    "\n\n    def __len__(self):\n        return",
    "\n\n    def __eq__(self, other):\n",
    "\n\n    def __repr__(self):\n        return",
)


@dataclass(frozen=True)
class Turn:
    """One question and what the server made of it."""

    asked: str
    answer: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 if every answer came, 1 if one did not, 2 for a mistake in the file."""
    parser = argparse.ArgumentParser(prog="python -m swiftkv.demo", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/embedded.yaml"))
    args = parser.parse_args(argv)
    console = Console()
    # A demo that is told to stop stops its node, too.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        config = load_config(args.config)
        turns = _run(args.config, config, console)
    except ConfigError as error:
        for line in str(error).splitlines():
            print(line if line.startswith(str(args.config)) else f"{args.config}: {line}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return _verdict(turns, console)


def _run(path: Path, config: Config, console: Console) -> list[Turn]:
    url = f"http://{config.node.host}:{_fixed_port(config)}"
    api_key = config.node.api_key() or "none"
    names = ", ".join(model.name for model in config.models)
    with tempfile.TemporaryFile("w+") as log, _node(path, log, config.node.shutdown_timeout) as process:
        with console.status(f"starting {names}") as status:
            start_s = time.monotonic()
            while not (states := _states(url))[0]:
                waited_s = time.monotonic() - start_s
                if process.poll() is not None or waited_s > _START_TIMEOUT_S:
                    raise EngineError(f"the node did not start:\n{_read(log)}")
                status.update(f"starting {names}: {states[1]} ({waited_s:.0f} s)")
                time.sleep(_POLL_S)
        console.print(f"{names} at {url}, up after {time.monotonic() - start_s:.1f} s\n")
        turns = [
            turn for model in config.models for turn in _converse(model, _base_url(config, model), api_key, console)
        ]
        if process.poll() is not None:
            raise EngineError(f"the node stopped while it was talked to:\n{_read(log)}")
    if process.returncode != 0:
        raise EngineError(f"the node ended with exit code {process.returncode}")
    console.print("the node has stopped")
    return turns


@contextlib.contextmanager
def _node(path: Path, log: IO[str], shutdown_timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """The node as a process of its own, gone at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "swiftkv.cli", "serve", str(path)], stdout=log, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(shutdown_timeout_s + 15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _states(url: str) -> tuple[bool, str]:
    """Whether the node serves, and how far each model is."""
    try:
        response = httpx.get(f"{url}/ready", timeout=5)
        models = response.json().get("models") or {}
    except (httpx.HTTPError, ValueError):
        return False, "loading"
    return response.is_success, ", ".join(f"{name} {state}" for name, state in models.items())


def _converse(model: ModelConfig, base_url: str, api_key: str, console: Console) -> list[Turn]:
    """One conversation with `model`, shown as it goes."""
    is_code = model.name == "code"
    table = Table(title=f"{model.name} at {base_url}", title_justify="left", show_lines=True, expand=True)
    for heading in ("prompt tokens", "from cache", "first token"):
        table.add_column(heading, justify="right", width=7)
    table.add_column("file" if is_code else "conversation", ratio=1)
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=120)
    turns: list[Turn] = []
    with Live(table, console=console, auto_refresh=False) as live:
        for asked in PROGRAM if is_code else QUESTIONS:
            turn = (
                _continue_program(client, model.name, turns, asked)
                if is_code
                else _ask(client, model.name, turns, asked)
            )
            turns.append(turn)
            said = Text(turn.asked.lstrip("\n") + ("" if is_code else "\n"), style="dim")
            said.append(turn.answer, style="not dim bold")
            figures = (turn.num_prompt_tokens, turn.num_cached_tokens, f"{turn.ttft_s * 1000:.0f} ms")
            table.add_row(*map(str, figures), said)
            live.refresh()
    console.print()
    return turns


def _ask(client: openai.OpenAI, model: str, turns: Sequence[Turn], asked: str) -> Turn:
    messages: list[Any] = []
    for turn in turns:
        messages += [{"role": "user", "content": turn.asked}, {"role": "assistant", "content": turn.answer}]
    messages.append({"role": "user", "content": asked})
    start_s = time.perf_counter()
    with _as_engine_error(model):
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_completion_tokens=_MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
        )
        return _read_turn(asked, stream, start_s)


def _continue_program(client: openai.OpenAI, model: str, turns: Sequence[Turn], asked: str) -> Turn:
    prompt = "".join(turn.asked + turn.answer for turn in turns) + asked
    start_s = time.perf_counter()
    with _as_engine_error(model):
        stream = client.completions.create(
            model=model,
            prompt=prompt,
            temperature=0,
            max_tokens=_MAX_TOKENS,
            stop=["\n\n"],
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"repetition_penalty": 1.1},
        )
        return _read_turn(asked, stream, start_s)


def _read_turn(asked: str, stream: Any, start_s: float) -> Turn:
    """The stream's text, with the time to its first piece and the usage at its end."""
    answer, ttft_s, usage = "", 0.0, None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            if piece and not answer:
                ttft_s = time.perf_counter() - start_s
            answer += piece or ""
    if usage is None:
        raise EngineError("the stream ended without usage")
    details = usage.prompt_tokens_details
    cached = (details and details.cached_tokens) or 0
    return Turn(asked, answer, usage.prompt_tokens, cached, usage.completion_tokens, ttft_s)


@contextlib.contextmanager
def _as_engine_error(model: str) -> Iterator[None]:
    try:
        yield
    except openai.OpenAIError as error:
        raise EngineError(f"{model} did not answer: {error}") from error


def _verdict(turns: Sequence[Turn], console: Console) -> int:
    answered = sum(turn.num_output_tokens > 0 for turn in turns)
    prompt_tokens = sum(turn.num_prompt_tokens for turn in turns)
    share = sum(turn.num_cached_tokens for turn in turns) / max(prompt_tokens, 1)
    console.print(
        f"{answered} of {len(turns)} answers came; {share:.0%} of {prompt_tokens} prompt tokens from the cache"
    )
    return 0 if answered == len(turns) else 1


def _base_url(config: Config, model: ModelConfig) -> str:
    if model.endpoint is not None:
        return f"http://{config.node.host}:{model.endpoint.port}/v1"
    return f"http://{config.node.host}:{config.node.port}/models/{model.name}/v1"


def _fixed_port(config: Config) -> int:
    ports = [config.node.port, *(model.endpoint.port for model in config.models if model.endpoint)]
    if 0 in ports:
        raise ConfigError("port: the demo must know where to talk to; write a port number instead of 0")
    return config.node.port


def _read(log: IO[str]) -> str:
    log.seek(0)
    return log.read().strip()


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
