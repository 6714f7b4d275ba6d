"""A node that lends, as its clients and its administrator see it: conversations, budgets, pools."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.support.checkpoints import make_checkpoint
from tests.support.node_process import DEADLINE_S, NodeProcess, wait_for

KEPT_STATES = ("free", "used", "cached", "lent", "in_flight", "staging", "elsewhere")
BUDGET_INTERVAL_S = 0.05

VOCAB_SIZE = 320
MASTER_SHAPE = {"num_hidden_layers": 6}
WORKER_SHAPES: dict[str, dict[str, Any]] = {
    "broad": {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 3},
    "deep": {"num_hidden_layers": 7, "num_attention_heads": 2, "num_key_value_heads": 1},
    "odd": {"num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 48},
}
MAX_POSITION = 16384
FULL, WINDOW = "full_attention", "sliding_attention"
HYBRID_SHAPES: dict[str, dict[str, Any]] = {
    "master": {"num_hidden_layers": 6, "layer_types": [FULL, WINDOW, WINDOW] * 2},
    "broad": {"num_hidden_layers": 5, "layer_types": [WINDOW] * 4 + [FULL]},
    "odd": {"num_hidden_layers": 3, "layer_types": [FULL, WINDOW, FULL], "num_key_value_heads": 4, "head_dim": 48},
}


def make_checkpoints(directory: Path) -> dict[str, Path]:
    """Make a checkpoint for masters, and one of a different shape for each kind of worker."""
    shapes = {"master": MASTER_SHAPE, **WORKER_SHAPES}
    for seed, (name, shape) in enumerate(shapes.items()):
        make_checkpoint(
            directory / name, "llama", seed=seed, tokenizer=True, max_position_embeddings=MAX_POSITION, **shape
        )
    return {name: directory / name for name in shapes}


def make_hybrid_checkpoints(directory: Path) -> dict[str, Path]:
    """Make models some of whose layers look back over 40 tokens, under the same names as the dense ones."""
    for seed, (name, shape) in enumerate(HYBRID_SHAPES.items()):
        make_checkpoint(
            directory / name,
            "qwen3",
            seed=seed,
            tokenizer=True,
            max_position_embeddings=MAX_POSITION,
            use_sliding_window=True,
            sliding_window=40,
            **shape,
        )
    return {name: directory / name for name in HYBRID_SHAPES}


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's addition to a conversation, and the seed of its answer, which is greedy without one."""

    question: tuple[int, ...]
    max_tokens: int
    seed: int | None = None

    def body(self, model: str, history: Sequence[int]) -> dict[str, Any]:
        sampling = {"temperature": 0} if self.seed is None else {"temperature": 0.9, "top_p": 0.95, "seed": self.seed}
        prompt = [*history, *self.question]
        fixed = {"ignore_eos": True, "return_token_ids": True, "return_cached_tokens_details": True}
        return {"model": model, "prompt": prompt, "max_tokens": self.max_tokens, **fixed, **sampling}


Conversation = tuple[Turn, ...]
Answers = list[list[int]]


def conversation(
    seed: int, num_turns: int = 3, question_tokens: tuple[int, int] = (40, 110), max_tokens: tuple[int, int] = (8, 40)
) -> Conversation:
    """Make a conversation, the same for the same arguments. Every other one is greedy, the rest have seeds."""
    rng = random.Random(seed)

    def turn() -> Turn:
        question = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(*question_tokens)))
        return Turn(question, rng.randint(*max_tokens), rng.randrange(1 << 32) if seed % 2 else None)

    return tuple(turn() for _ in range(num_turns))


class LendingNode:
    """Talks to a `NodeProcess`. Its methods may be called from any thread."""

    def __init__(self, process: NodeProcess) -> None:
        self.process = process
        self._http = httpx.Client(base_url=process.url, timeout=DEADLINE_S, limits=httpx.Limits(max_connections=None))

    def close(self) -> None:
        self._http.close()

    def complete(self, body: dict[str, Any]) -> httpx.Response:
        return self._http.post("/v1/completions", json=body)

    def hold(self, model: str, turns: Conversation) -> Answers:
        """Return the tokens of every answer. Fails if one is refused."""
        history: list[int] = []
        answers = []
        for turn in turns:
            response = self.complete(turn.body(model, history))
            assert response.status_code == 200, response.text
            answers.append(response.json()["choices"][0]["token_ids"])
            cached = response.json()["usage"]["prompt_tokens_details"]
            assert sum(cached["cached_tokens_details"].values()) == cached["cached_tokens"]
            assert len(answers[-1]) == turn.max_tokens
            history += [*turn.question, *answers[-1]]
        return answers

    def hold_all(self, model: str, conversations: Sequence[Conversation]) -> list[Answers]:
        """Hold all conversations at once."""
        with ThreadPoolExecutor(len(conversations)) as clients:
            return list(clients.map(lambda turns: self.hold(model, turns), conversations))

    def max_model_len(self, model: str) -> int:
        (card,) = (card for card in self._http.get("/v1/models").json()["data"] if card["id"] == model)
        return int(card["max_model_len"])

    def ask_admin(self, path: str) -> dict[str, Any] | None:
        """Return the answer of an admin route; `None` while the engine is not there or does not answer."""
        answer = self._http.get(f"/admin/{path}", headers=self.process.admin_headers())
        return answer.json() if answer.status_code == 200 else None

    def set_budget(self, worker: str, budget: str | int) -> httpx.Response:
        body = {"budget": budget}
        return self._http.patch(f"/admin/lending/{worker}", json=body, headers=self.process.admin_headers())

    def pool(self, model: str) -> dict[str, Any]:
        """Return a model's `/admin/pools`, once its engine answers."""
        return wait_for(f"{model} to answer", lambda: self.ask_admin(f"pools/{model}")) or {}

    def blocks(self, model: str) -> dict[str, int]:
        """Return the blocks of all KV groups, by state; all 0 while the engine is not there."""
        view = self.ask_admin(f"pools/{model}") or {"groups": []}
        states = (*KEPT_STATES, "total", "borrowed_free", "borrowed_used", "borrowed_cached", "borrowed_in_flight")
        return {state: sum(group[state] for group in view["groups"]) for state in states}

    def model(self, name: str) -> dict[str, Any]:
        """Return the model's entry in `/admin/lending`."""
        overview = wait_for("the node to answer", lambda: self.ask_admin("lending")) or {"models": []}
        (view,) = (view for view in overview["models"] if view["model"] == name)
        return view

    def extents(self, model: str, side: str, state: str) -> dict[str, int]:
        """Count extents in `state`, by peer; `side` is `lends` or `borrows`. Empty while the engine is not there."""
        peer = "borrower" if side == "lends" else "lender"
        counts: dict[str, int] = {}
        for link in (self.ask_admin(f"pools/{model}") or {side: []})[side]:
            number = sum(extent["state"] == state for extent in link["extents"])
            counts[link[peer]] = counts.get(link[peer], 0) + number
        return counts

    def lent(self, lender: str, borrower: str) -> int:
        """Return the number of extents that both sides agree on; 0 if they disagree or one is not there."""
        lent = self.extents(lender, "lends", "lent").get(borrower, 0)
        return lent if lent == self.extents(borrower, "borrows", "held").get(lender, 0) else 0

    def wait_until_lent(self, lender: str, borrower: str) -> int:
        return wait_for(f"{lender} to lend to {borrower}", lambda: self.lent(lender, borrower))

    def is_ready(self) -> bool:
        return set(self.process.ready().values()) == {"ready"}

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric's value; 0 if there is no such sample."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        for line in self._http.get("/metrics").text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample.startswith(f"{name}{{") and wanted <= set(sample.partition("{")[2].removesuffix("}").split(",")):
                return float(value)
        return 0.0

    def assert_at_rest(self, *models: str) -> None:
        """Assert that every pool adds up, that no block is in use, and that both sides of every link agree."""
        for model in models:
            wait_for(f"{model} to be at rest", lambda model=model: _is_at_rest(self.blocks(model)))
            for group in self.pool(model)["groups"]:
                assert sum(group[state] for state in KEPT_STATES) == group["total"]
        wait_for("both sides to agree", lambda: self._sides_agree(models))

    def _sides_agree(self, models: Sequence[str]) -> bool:
        """Return whether lenders and borrowers agree on every extent and epoch, with no extent between states."""
        lent, held = set[tuple[Any, ...]](), set[tuple[Any, ...]]()
        for model in models:
            view = self.pool(model)
            for side, kept in (("lends", lent), ("borrows", held)):
                for link in view[side]:
                    ends = (link["lender"], link["lender_group"], link["borrower"], link["borrower_group"])
                    for extent in link["extents"]:
                        if extent["state"] in ("offered", "recalled"):
                            return False
                        if extent["state"] in ("lent", "held"):
                            kept.add((*ends, extent["extent"], extent["epoch"]))
        return lent == held


class Reference:
    """A node with `lending: off`, where everything fits: its answers are right by definition."""

    def __init__(self, node: LendingNode) -> None:
        self._node = node
        self._known: dict[tuple[str, Conversation], Answers] = {}

    def answers(self, model: str, conversations: Sequence[Conversation]) -> list[Answers]:
        """Return the answers of `model`: `float32` or `bfloat16` of the master's checkpoint, or `broad`, a worker's."""
        new = [turns for turns in conversations if (model, turns) not in self._known]
        for turns, answers in zip(new, self._node.hold_all(model, new) if new else [], strict=True):
            self._known[model, turns] = answers
        return [self._known[model, turns] for turns in conversations]


def _is_at_rest(blocks: dict[str, int]) -> bool:
    return blocks["total"] > 0 and not any(
        blocks[state] for state in ("used", "in_flight", "borrowed_used", "borrowed_in_flight")
    )


@contextmanager
def serving(config: dict[str, Any], directory: Path, temporary: Path) -> Iterator[LendingNode]:
    """Run a node, and kill it at the end; `temporary` as for `NodeProcess`."""
    with NodeProcess(config, directory, temporary) as process:
        node = LendingNode(process)
        try:
            yield node
        finally:
            node.close()


@contextmanager
def meanwhile(action: Callable[[], object], interval_s: float) -> Iterator[None]:
    """Call `action` again and again from another thread, and raise its exception at the end of the block."""
    ended = threading.Event()

    def act() -> int:
        count = 0
        while True:
            action()
            count += 1
            if ended.wait(interval_s):
                return count

    with ThreadPoolExecutor(1) as actor:
        acting = actor.submit(act)
        try:
            yield
        finally:
            ended.set()
        assert acting.result() > 0
