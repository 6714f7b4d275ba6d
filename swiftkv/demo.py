"""`make demo`: starts a node, talks to its models through the openai client, and stops it.

The first tables show that from the second turn on most of a prompt comes from the KV cache. Then, if the node lends, a
conversation outgrows its model's own pool, and is held again with lending off.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

import httpx
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swiftkv.admin_key import find_admin_key
from swiftkv.config import Config, ModelConfig, load_config
from swiftkv.errors import ConfigError, EngineError
from swiftkv.planning.models import SizedPlan
from swiftkv.planning.node import plan_node
from swiftkv.units import format_size

try:
    import openai
except ModuleNotFoundError:
    raise SystemExit("the demo talks through the openai client: pip install 'swiftkv[demo]'") from None

_START_TIMEOUT_S = 300.0
_POLL_S = 0.2
_MAX_TOKENS = 64
_SERVE = [sys.executable, "-m", "swiftkv.cli", "serve"]
_NUM_PAGES = 7
_INTERRUPTED_AFTER = 3
_FIGURES = ("prompt tokens", "from cache", "first token")

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
ABOUT_A_PAGE = "What is this about?"

Messages = list[Any]  # as the chat API takes them


@dataclass(frozen=True)
class Turn:
    """One question, its answer and the figures of both."""

    asked: str
    answer: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    ttft_s: float


class TooLongError(EngineError):
    """A prompt that is longer than the model takes."""


@dataclass(frozen=True)
class Exchange:
    """One request of the long conversation, or of another user beside it."""

    who: str
    messages: Messages
    turn: Turn


@dataclass(frozen=True)
class Pool:
    """Counts of a borrower's blocks, those with KV and all; its own without the layer-stream cache."""

    in_own: int
    own: int
    in_borrowed: int
    borrowed: int
    stream: int


class Node:
    """A running node that serves `config`, as a client sees it."""

    def __init__(self, config: Config) -> None:
        ports = [config.node.port, *(model.endpoint.port for model in config.models if model.endpoint)]
        if 0 in ports:
            raise ConfigError("port: the demo must know where to talk to; write a port number instead of 0")
        self._config = config
        self.url = f"http://{config.node.host}:{config.node.port}"
        self._api_key = config.node.api_key() or "none"

    def base_url(self, model: ModelConfig) -> str:
        if model.endpoint is not None:
            return f"http://{self._config.node.host}:{model.endpoint.port}/v1"
        return f"{self.url}/models/{model.name}/v1"

    def client(self, model: ModelConfig) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url(model), api_key=self._api_key, max_retries=0, timeout=120)

    def readiness(self) -> tuple[bool, str]:
        """Return whether the node serves, and how far each model is."""
        try:
            response = httpx.get(f"{self.url}/ready", timeout=5)
            models = response.json().get("models") or {}
        except (httpx.HTTPError, ValueError):
            return False, "loading"
        return response.is_success, ", ".join(f"{name} {state}" for name, state in models.items())

    def pages(self, model: ModelConfig, sizes: Sequence[int]) -> list[str]:
        """Return pages of the standard library's text, cut by the model's tokenizer to so many tokens each."""
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = "".join(file.read_text("utf-8") for file in files)[: 16 * sum(sizes)]
        url = f"{self.url}/models/{model.name}"
        tokens = self._call("POST", f"{url}/tokenize", self._api_key, {"prompt": text})["tokens"]
        ends = list(itertools.accumulate(sizes))
        cuts = [tokens[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        return [self._call("POST", f"{url}/detokenize", self._api_key, {"tokens": cut})["prompt"] for cut in cuts]

    def admin(self, method: str, path: str, body: object = None) -> Any:
        key = self._config.node.admin_key() or find_admin_key(self.url) or "none"
        return self._call(method, f"{self.url}/admin/{path}", key, body)

    def pool(self, model: ModelConfig) -> Pool:
        groups = self.admin("GET", f"pools/{model.name}")["groups"]

        def total(*states: str) -> int:
            return sum(group[state] for group in groups for state in states)

        holding = ("used", "cached", "in_flight")
        in_borrowed = total(*(f"borrowed_{state}" for state in holding))
        stream = total("staging")
        return Pool(total(*holding), total("total") - stream, in_borrowed, in_borrowed + total("borrowed_free"), stream)

    def loans(self, model: ModelConfig) -> dict[str, int]:
        """Return the bytes that `model` borrows, by lender."""
        models = {entry["model"]: entry for entry in self.admin("GET", "lending")["models"]}
        loans: dict[str, int] = {}
        for link in models[model.name]["borrows"]:
            loans[link["lender"]] = loans.get(link["lender"], 0) + link["lent_bytes"]
        return loans

    def _call(self, method: str, url: str, key: str, body: object) -> Any:
        try:
            response = httpx.request(method, url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=90)
        except httpx.HTTPError as error:
            raise EngineError(f"{method} {url}: {error}") from error
        if not response.is_success:
            raise EngineError(f"{method} {url}: {response.status_code} {response.text}")
        return response.json()


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if every answer came and lending changed none, 1 if not, 2 for a mistake in the file."""
    parser = argparse.ArgumentParser(prog="python -m swiftkv.demo", description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/embedded.yaml"))
    args = parser.parse_args(argv)
    # A demo that is told to stop stops its node, too.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        return _run(args.config, Console(highlight=False))
    except ConfigError as error:
        for line in str(error).splitlines():
            print(line if line.startswith(str(args.config)) else f"{args.config}: {line}", file=sys.stderr)
        return 2
    except EngineError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _run(path: Path, console: Console) -> int:
    config = load_config(path)
    plans = plan_node(config, need_weights=True)
    # The model, if there is one, that borrows and takes longer sequences than its own pool holds.
    pairs = zip(config.models, plans, strict=True)
    sized = ((model, plan) for model, plan in pairs if isinstance(plan, SizedPlan))
    borrower = next(((model, plan) for model, plan in sized if plan.max_model_len > plan.pool_tokens), None)
    exchanges: list[Exchange] = []
    num_changed = 0
    with _serving(path, config, console) as node:
        turns = [turn for model in config.models for turn in _converse(node, model, console)]
        if borrower:
            exchanges = _outgrow(node, *borrower, console)
            num_changed += _change_budget(node, borrower[0], exchanges[-1], console)
    if borrower:
        num_changed += _compare(path, borrower[0], exchanges, console)
        console.print(f"lending changed {num_changed or 'none'} of the answers")
    return _verdict([*turns, *(exchange.turn for exchange in exchanges)], console) or int(num_changed > 0)


@contextlib.contextmanager
def _serving(path: Path, config: Config, console: Console, *options: str) -> Iterator[Node]:
    """Run a node that serves the file, until the end of the block."""
    node = Node(config)
    names = ", ".join(model.name for model in config.models)
    with (
        tempfile.TemporaryFile("w+") as log,
        _process([*_SERVE, str(path), *options], log, config.node.shutdown_timeout) as process,
    ):
        with console.status(f"starting {names}") as status:
            start_s = time.monotonic()
            while not (state := node.readiness())[0]:
                waited_s = time.monotonic() - start_s
                if process.poll() is not None or waited_s > _START_TIMEOUT_S:
                    raise EngineError(f"the node did not start:\n{_read(log)}")
                status.update(f"starting {names}: {state[1]} ({waited_s:.0f} s)")
                time.sleep(_POLL_S)
        console.print(f"{names} at {node.url}, up after {time.monotonic() - start_s:.1f} s\n")
        yield node
        if process.poll() is not None:
            raise EngineError(f"the node stopped while it was talked to:\n{_read(log)}")
    if process.returncode != 0:
        raise EngineError(f"the node ended with exit code {process.returncode}")
    console.print("the node has stopped\n")


@contextlib.contextmanager
def _process(command: list[str], log: IO[str], shutdown_timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that is gone at the end of the block."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(shutdown_timeout_s + 15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _converse(node: Node, model: ModelConfig, console: Console) -> list[Turn]:
    """Hold one conversation with `model`, shown as it goes."""
    is_code = model.name == "code"
    table = Table(title=f"{model.name} at {node.base_url(model)}", title_justify="left", show_lines=True, expand=True)
    for heading in ("prompt tokens", "from cache", "first token"):
        table.add_column(heading, justify="right", width=7)
    table.add_column("file" if is_code else "conversation", ratio=1)
    client = node.client(model)
    turns: list[Turn] = []
    with Live(table, console=console, auto_refresh=False) as live:
        for asked in PROGRAM if is_code else QUESTIONS:
            if is_code:
                turn = _continue_program(client, model.name, turns, asked)
            else:
                history = [message for turn in turns for message in _as_messages(turn)]
                turn = _ask(client, model.name, [*history, _user(asked)])
            turns.append(turn)
            said = Text(turn.asked.lstrip("\n") + ("" if is_code else "\n"), style="dim")
            said.append(turn.answer, style="not dim bold")
            table.add_row(*_figures(turn), said)
            live.refresh()
    console.print()
    return turns


def _outgrow(node: Node, model: ModelConfig, plan: SizedPlan, console: Console) -> list[Exchange]:
    """Hold a conversation that grows beyond the model's own pool, with another user in between."""
    loans = node.loans(model)
    lenders = ", ".join(loans)
    borrowed = ", ".join(f"{format_size(num_bytes)} from {name}" for name, num_bytes in loans.items())
    console.print(
        f"{model.name}'s own pool holds {plan.pool_tokens:,} tokens. It borrows {borrowed}, and takes "
        f"{plan.max_model_len:,} in one conversation. Every turn of this one brings a page of text:\n"
    )
    page_tokens = int(min(1.4 * plan.pool_tokens, 0.85 * plan.max_model_len)) // _NUM_PAGES
    *pages, other_page = node.pages(model, [page_tokens] * _NUM_PAGES + [4 * plan.pool_tokens // 5])
    table = Table(title=f"{model.name}, lending on", title_justify="left")
    table.add_column("turn")
    for heading in _FIGURES:
        table.add_column(heading, justify="right")
    table.add_column("blocks in own pool", justify="right")
    table.add_column(f"blocks borrowed from {lenders}", justify="right")
    client = node.client(model)
    exchanges: list[Exchange] = []
    history: Messages = []
    with Live(table, console=console, auto_refresh=False) as live:

        def ask(who: str, messages: Messages) -> Turn:
            turn = _ask(client, model.name, messages)
            exchanges.append(Exchange(who, messages, turn))
            pool = node.pool(model)
            places = (f"{pool.in_own} of {pool.own}", f"{pool.in_borrowed} of {pool.borrowed}")
            table.add_row(who, *_figures(turn), *places)
            live.refresh()
            return turn

        for number, page in enumerate(pages, 1):
            history += _as_messages(ask(str(number), [*history, _user(f"{page}\n\n{ABOUT_A_PAGE}")]))
            if number == _INTERRUPTED_AFTER:
                ask("another user", [_user(f"{other_page}\n\n{ABOUT_A_PAGE}")])
    stream = node.pool(model).stream
    console.print(
        f"\nBorrowed blocks pass through the other {stream} blocks of its own pool, one layer at a time. "
        "Answers are left out: the demo's models lose the thread after some 1,000 tokens.\n"
    )
    return exchanges


def _change_budget(node: Node, model: ModelConfig, last: Exchange, console: Console) -> int:
    """Take memory back while an answer comes, and give it again; return how many answers that changed: 0 or 1."""
    lender = max(node.loans(model).items(), key=lambda loan: loan[1])[0]
    state = next(entry for entry in node.admin("GET", "lending")["models"] if entry["model"] == lender)
    changes = []

    def lower() -> None:
        changes.append(node.admin("PATCH", f"lending/{lender}", {"budget": f"{3 * state['lent_bytes'] // 4}B"}))

    client = node.client(model)
    messages = [*last.messages, *_as_messages(last.turn)[1:], _user("Go on.")]
    undisturbed = _ask(client, model.name, messages, min_tokens=_MAX_TOKENS)
    disturbed = _ask(client, model.name, messages, min_tokens=_MAX_TOKENS, after_first=lower)
    again = node.admin("PATCH", f"lending/{lender}", {"budget": f"{state['budget_bytes']}B"})
    size = {key: format_size(value) for key, value in changes[0].items() if key.endswith("_bytes")}
    before = format_size(state["budget_bytes"])
    is_same = disturbed.answer == undisturbed.answer
    console.print(
        f"In the middle of the next answer {lender} may lend {size['budget_bytes']} instead of {before}: "
        f"{size['recalled_bytes']} came back in {changes[0]['took_s'] * 1000:.0f} ms, and the answer is "
        f"{'the same as' if is_same else 'ANOTHER than'} without the change. Then it may lend as much as before: "
        f"{format_size(again['lent_bytes'])} are lent.\n"
    )
    return int(not is_same)


def _compare(path: Path, model: ModelConfig, exchanges: Sequence[Exchange], console: Console) -> int:
    """Repeat the requests with lending off, and return how many answers differ."""
    console.print(f"The same with lending off (swiftkv serve {path} --no-lending):\n")
    table = Table(title=f"{model.name}, lending on / off", title_justify="left")
    table.add_column("turn")
    for heading in (*_FIGURES, "answer"):
        table.add_column(heading, justify="right")
    num_changed = 0
    note = ""
    with _serving(path, load_config(path, lending=False), console, "--no-lending") as node:
        client = node.client(model)
        with Live(table, console=console, auto_refresh=False) as live:
            for exchange in exchanges:
                tokens, *lent = _figures(exchange.turn)
                try:
                    turn = _ask(client, model.name, exchange.messages)
                except TooLongError as error:
                    table.add_row(exchange.who, tokens, *(f"{figure} / -" for figure in lent), "refused")
                    note = note or f"Turn {exchange.who} is refused: {error}.\n"
                else:
                    both = (f"{on} / {off}" for on, off in zip(lent, _figures(turn)[1:], strict=True))
                    is_same = turn.answer == exchange.turn.answer
                    num_changed += not is_same
                    table.add_row(exchange.who, tokens, *both, "the same" if is_same else "ANOTHER")
                live.refresh()
        console.print(f"\n{note}")
    return num_changed


def _ask(
    client: openai.OpenAI,
    model: str,
    messages: Messages,
    min_tokens: int = 0,
    after_first: Callable[[], None] | None = None,
) -> Turn:
    start_s = time.perf_counter()
    with _as_engine_error(model):
        stream = client.chat.completions.create(
            model=model,
            messages=messages,
            temperature=0,
            max_completion_tokens=_MAX_TOKENS,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"min_tokens": min_tokens},
        )
        return _read_turn(messages[-1]["content"], stream, start_s, after_first)


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


def _read_turn(asked: str, stream: Any, start_s: float, after_first: Callable[[], None] | None = None) -> Turn:
    """Return the streamed text, with the time to its first piece and the usage at its end."""
    answer, ttft_s, usage = "", 0.0, None
    for event in stream:
        usage = event.usage or usage
        for choice in event.choices:
            piece = choice.text if hasattr(choice, "text") else choice.delta.content
            if piece and not answer:
                ttft_s = time.perf_counter() - start_s
                if after_first is not None:
                    after_first()
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
    except openai.BadRequestError as error:
        if error.code == "context_length_exceeded":
            message = error.body.get("message") if isinstance(error.body, dict) else None
            raise TooLongError(message or str(error)) from error
        raise EngineError(f"{model} refused: {error}") from error
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


def _figures(turn: Turn) -> tuple[str, str, str]:
    return f"{turn.num_prompt_tokens:,}", f"{turn.num_cached_tokens:,}", f"{turn.ttft_s * 1000:.0f} ms"


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _as_messages(turn: Turn) -> Messages:
    return [_user(turn.asked), {"role": "assistant", "content": turn.answer}]


def _read(log: IO[str]) -> str:
    log.seek(0)
    return log.read().strip()


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
