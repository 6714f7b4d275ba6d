"""`swiftkv demo` and `make demo`: starts a node, talks to its models through the openai client, and stops it.

The first tables show that from the second turn on most of a prompt comes from the KV cache. Then, if the node lends, a
conversation outgrows its model's own pool. The node is stopped and started again, and a conversation goes on from
storage. At last the long conversation is held again with lending off.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from swiftkv.config import load_config
from swiftkv.demo_node import DemoNode, TooLongError, as_engine_error, serving, write_storing_config
from swiftkv.errors import ConfigError, EngineError
from swiftkv.model_config import ModelConfig
from swiftkv.planning.models import SizedPlan
from swiftkv.planning.node import plan_node
from swiftkv.units import format_size

if TYPE_CHECKING:
    import openai

_MAX_TOKENS = 64
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
# A model named code gets a file that grows: its answers stay in it, and the next lines follow.
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


@dataclass(frozen=True)
class Exchange:
    """One request of the long conversation, or of another user beside it."""

    who: str
    messages: Messages
    turn: Turn


def demo_config() -> Path:
    """Return the demo's file, whose models lie beside it: the one in the package, or otherwise in the checkout."""
    package = Path(__file__).parent
    inside = package / "demo_files/configs/embedded.yaml"
    return inside if inside.exists() else package.parent / "configs/embedded.yaml"


def run_demo(config: Path) -> int:
    """Run the demo on the node that a YAML file describes, and print its tables.

    Return the exit code: 0 if every answer came and none differs from the one without lending, 1 if not, 2 if there is
    a mistake in the file.
    """
    # SIGTERM stops the demo's node, too.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        return _run(config, Console(highlight=False))
    except ConfigError as error:
        for line in str(error).splitlines():
            print(line if line.startswith(str(config)) else f"{config}: {line}", file=sys.stderr)
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
    keeper = next((model for model in config.models if not borrower or model is not borrower[0]), config.models[0])
    exchanges: list[Exchange] = []
    num_changed = 0
    with tempfile.TemporaryDirectory(prefix="swiftkv-demo-") as directory:
        kept = write_storing_config(path, keeper, Path(directory))
        with serving(kept or path, load_config(kept or path), console) as node:
            by_model = {model.name: _converse(node, model, console) for model in config.models}
            if borrower:
                exchanges = _outgrow(node, *borrower, console)
                num_changed += _change_budget(node, borrower[0], exchanges[-1], console)
        turns = [turn for of_model in by_model.values() for turn in of_model]
        if kept:
            turns.append(_go_on_after_restart(kept, keeper, by_model[keeper.name], console))
    if borrower:
        num_changed += _compare(path, borrower[0], exchanges, console)
        console.print(f"lending changed {num_changed or 'none'} of the answers")
    return _verdict([*turns, *(exchange.turn for exchange in exchanges)], console) or int(num_changed > 0)


def _converse(node: DemoNode, model: ModelConfig, console: Console) -> list[Turn]:
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


def _go_on_after_restart(path: Path, model: ModelConfig, turns: Sequence[Turn], console: Console) -> Turn:
    """Ask for the last turn of a conversation once more, on a node that has been started again."""
    last = turns[-1]
    console.print(f"{model.name}'s blocks were stored in files as they were computed. The node is started again:\n")
    with serving(path, load_config(path), console) as node:
        turn = _ask_again(node.client(model), model.name, turns)
    is_same = turn.answer == last.answer
    console.print(
        f"Of the {turn.num_prompt_tokens:,} tokens of {model.name}'s conversation {turn.num_cached_tokens:,} came from "
        f"storage, the first token came after {turn.ttft_s * 1000:.0f} ms, and the answer is "
        f"{'the same as' if is_same else 'DIFFERENT from the one'} before the restart.\n"
    )
    return turn


def _ask_again(client: openai.OpenAI, model: str, turns: Sequence[Turn]) -> Turn:
    """Ask for the last turn once more."""
    *before, last = turns
    if model == "code":
        return _continue_program(client, model, before, last.asked)
    return _ask(client, model, [*(message for turn in before for message in _as_messages(turn)), _user(last.asked)])


def _outgrow(node: DemoNode, model: ModelConfig, plan: SizedPlan, console: Console) -> list[Exchange]:
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


def _change_budget(node: DemoNode, model: ModelConfig, last: Exchange, console: Console) -> int:
    """Take memory back during an answer, and lend it again; return how many answers changed by that: 0 or 1."""
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
        f"{'the same as' if is_same else 'DIFFERENT from'} without the change. Then it may lend as much as before: "
        f"{format_size(again['lent_bytes'])} is lent.\n"
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
    with serving(path, load_config(path, lending=False), console, "--no-lending") as node:
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
                    table.add_row(exchange.who, tokens, *both, "the same" if is_same else "DIFFERENT")
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
    with as_engine_error(model):
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
    with as_engine_error(model):
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


def _exit_on_signal(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
