"""Nodes that can be held still, loads, and reports, for all lending_*.py programs.

Nodes that are compared are up at the same time, and those that are not measured are held still (SIGSTOP). So they can
be measured in turns, in the same minutes, without costing each other anything.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import yaml
from lean_client import exchange, request_bytes
from peers import processor_name
from prometheus_client.parser import text_string_to_metric_families

from swiftkv.admin_key import find_admin_key
from swiftkv.bench.client import Target, TimedAnswer
from swiftkv.checkpoint import make, read_texts, save, standard_library_files, train_tokenizer
from swiftkv.config import Config, load_config
from swiftkv.planning.lending import plan_lending
from swiftkv.planning.models import ModelPlan
from swiftkv.planning.node import plan_node

OUT = Path(__file__).parent / "out"
VOCAB = (300, 31000)
SMALL_MODEL = "a random model of Qwen3-0.6B's shape"
"""The default model of programs that serve a `small_checkpoint`."""
EXTRA = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
_START_TIMEOUT_S = 600.0
_LEND_TIMEOUT_S = 60.0
_STATS_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class StreamSeconds:
    """Sums over the steps of one model that streamed, since its engine started; subtract two to get those between."""

    steps: float = 0.0
    load_s: float = 0.0
    store_s: float = 0.0
    exposed_s: float = 0.0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    peer_hit_tokens: float = 0.0

    def __sub__(self, before: StreamSeconds) -> StreamSeconds:
        return StreamSeconds(*(a - b for a, b in zip(asdict(self).values(), asdict(before).values(), strict=True)))


class Node:
    """A swiftkv node in a directory of its own, with the requests that the programs send to it."""

    def __init__(self, name: str, node: dict[str, Any], models: Sequence[dict[str, Any]]) -> None:
        """`node` and `models` are the sections of the YAML file, without the port."""
        self.name = name
        self._names = [model["name"] for model in models]
        self._directory = tempfile.TemporaryDirectory(prefix="lend-")
        self._http = httpx.Client(timeout=120)  # one for all calls, because making one takes tens of milliseconds
        self._port = free_port()
        file = self.directory / "node.yaml"
        file.write_text(yaml.safe_dump({"node": {"port": self._port, **node}, "models": list(models)}, sort_keys=False))
        self.config: Config = load_config(file)
        self.plans: tuple[ModelPlan, ...] = plan_node(self.config, need_weights=True)
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "swiftkv", "serve", str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(self.directory)},
            )

    @property
    def directory(self) -> Path:
        return Path(self._directory.name)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.process.poll() is None:
            self.resume()
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                kill_tree(self.process.pid)
                self.process.wait()
        self._http.close()
        self._directory.cleanup()

    def plan(self, model: str) -> ModelPlan:
        return next(plan for plan in self.plans if plan.name == model)

    def target(self, model: str) -> Target:
        return Target(f"{self.url}/v1/completions", model, extra_body=EXTRA)

    def engine(self, model: str) -> psutil.Process:
        """Return the engine's process."""
        children = psutil.Process(self.process.pid).children()
        return next(child for child in children if child.cmdline()[-1] == model)

    def leases_address(self, model: str) -> str:
        """Return the address at which the model's coordinator listens."""
        (ipc,) = self.directory.glob("swiftkv-*")
        return f"ipc://{ipc}/{self._names.index(model)}.leases"

    def hold(self) -> None:
        hold_tree(self.process.pid)

    def resume(self) -> None:
        resume_tree(self.process.pid)

    def lending(self, model: str) -> dict[str, Any]:
        """Return the model's entry of GET /admin/lending."""
        answer = self._http.get(f"{self.url}/admin/lending", headers=self._admin_headers())
        answer.raise_for_status()
        return next(entry for entry in answer.json()["models"] if entry["model"] == model)

    def overview(self) -> dict[str, Any]:
        """Return the current view of all models: GET /admin/overview."""
        answer = self._http.get(f"{self.url}/admin/overview", headers=self._admin_headers())
        answer.raise_for_status()
        view: dict[str, Any] = answer.json()
        return view

    def set_budget(self, worker: str, num_bytes: int) -> dict[str, Any]:
        """Set a budget, and return the answer once recalled memory is back."""
        body = {"budget": f"{num_bytes}B"}
        answer = self._http.patch(f"{self.url}/admin/lending/{worker}", json=body, headers=self._admin_headers())
        answer.raise_for_status()
        change: dict[str, Any] = answer.json()
        return change

    def _admin_headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {find_admin_key(self.url)}"}

    def promised_bytes(self, master: str) -> int:
        """Return the bytes that `master` can borrow at first, according to the plan."""
        return next(room.lent_bytes for room in plan_lending(self.plans) if room.borrower.name == master)

    def wait_until_borrowed(self, master: str, num_bytes: int) -> None:
        """Wait until `master` has borrowed exactly `num_bytes`."""
        deadline_s = time.monotonic() + _LEND_TIMEOUT_S
        while (borrowed := self.lending(master)["borrowed_bytes"]) != num_bytes:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"{self.name}: {master} borrowed {borrowed} bytes, {num_bytes} were expected")
            time.sleep(0.05)

    def metrics(self, model: str) -> dict[str, float]:
        """Return a model's metrics by name; where there is one for each tier, that of peers."""
        return {
            sample.name: sample.value
            for family in text_string_to_metric_families(self._http.get(f"{self.url}/metrics").text)
            for sample in family.samples
            if sample.labels.get("model_name") == model and sample.labels.get("tier", "peer") == "peer"
        }

    def stream_seconds(self, model: str) -> StreamSeconds:
        """Return the engine's own sums, which are complete only when it is at rest."""
        values = self.metrics(model)
        return StreamSeconds(
            values.get("swiftkv:layer_stream_load_seconds_count", 0.0),
            values.get("swiftkv:layer_stream_load_seconds_sum", 0.0),
            values.get("swiftkv:layer_stream_store_seconds_sum", 0.0),
            values.get("swiftkv:layer_stream_exposed_seconds_sum", 0.0),
            values.get("vllm:request_queue_time_seconds_sum", 0.0),
            values.get("vllm:request_prefill_time_seconds_sum", 0.0),
            values.get("swiftkv:prefix_hit_tokens_total", 0.0),
        )

    def stream_seconds_at_rest(self, model: str) -> StreamSeconds:
        """Return the sums after the engine's last report, which it sends when it falls idle."""
        deadline_s = time.monotonic() + _STATS_TIMEOUT_S
        before = self.stream_seconds(model)
        while time.monotonic() < deadline_s:
            time.sleep(0.1)
            now = self.stream_seconds(model)
            if now == before:
                break
            before = now
        return before

    def _wait_until_ready(self) -> None:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                if self._http.get(f"{self.url}/ready").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                log = (self.directory / "log").read_text(errors="replace")
                raise SystemExit(f"{self.name} did not start:\n{log[-4000:]}")
            time.sleep(0.1)


@contextmanager
def only(running: Node, others: Iterable[Node]) -> Iterator[Node]:
    """Let `running` run inside, and hold it still afterwards; `others` are held still all the time."""
    for other in others:
        if other is not running:
            other.hold()
    running.resume()
    try:
        yield running
    finally:
        running.hold()


@contextmanager
def nodes_up(*nodes: Node) -> Iterator[None]:
    """Start all nodes at once, and stop them at the end."""
    with ExitStack() as stack:
        for node in nodes:
            stack.callback(node.stop)
        for node in nodes:
            stack.enter_context(node)
        yield


def model(name: str, checkpoint: Path, memory: str | int, role: str = "worker", **options: Any) -> dict[str, Any]:
    """Return a model's section of the YAML file."""
    section = {"name": name, "path": str(checkpoint.resolve()), "role": role, "kv_cache": {"memory": memory}}
    return section | options


def tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def hold_tree(pid: int) -> None:
    for process in tree(pid):
        process.suspend()


def resume_tree(pid: int) -> None:
    for process in tree(pid):
        process.resume()


def kill_tree(pid: int) -> None:
    for process in tree(pid):
        process.kill()


def pin(process: psutil.Process, cores: Sequence[int]) -> None:
    """Pin all threads of a process; later threads inherit this from the threads that start them."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, cores)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def small_checkpoint(given: Path | None) -> Path:
    """Return the checkpoint that was given, or a random model of Qwen3-0.6B's shape, made once (a minute or two)."""
    return given or _make_once(OUT / "checkpoints" / "small", "small")


def tiny_checkpoint() -> Path:
    """Return a checkpoint for an engine of which only the memory is needed."""
    return _make_once(OUT / "checkpoints" / "tiny", "tiny")


def _make_once(directory: Path, size: Any) -> Path:
    if not (directory / "tokenizer.json").exists():  # written last
        say(f"making a random checkpoint in {directory}")
        make("qwen3", size, directory)
    return directory


def make_shape(
    directory: Path, num_layers: int, num_kv_heads: int, max_position_embeddings: int, hidden_size: int = 64
) -> Path:
    """Make a random model of so many layers and KV heads of 32, as narrow as possible unless a width is given."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = train_tokenizer(read_texts(standard_library_files()[:10]), 512)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=max(num_kv_heads, hidden_size // 64),
        num_key_value_heads=num_kv_heads,
        head_dim=32,
        intermediate_size=hidden_size,
        max_position_embeddings=max_position_embeddings,
        rope_theta=1e6,  # type: ignore[call-arg]
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tokenizer, directory)
    return directory


class Tokens:
    """Random prompts that are never the same twice, so nothing is cached by chance."""

    def __init__(self, seed: int, vocab: tuple[int, int] = VOCAB) -> None:
        self._rng = random.Random(seed)
        self._vocab = vocab

    def fresh(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(*self._vocab) for _ in range(num_tokens)]


async def ask(target: Target, prompt: list[int], num_tokens: int) -> TimedAnswer:
    """Send one request; any failure ends the program."""
    answer = await exchange(target, request_bytes(target, prompt, num_tokens))
    if answer.error:
        raise SystemExit(f"{target.model} at {target.url}: {answer.error}")
    return answer


def time_per_output_token(answer: TimedAnswer) -> float:
    """Return the seconds per token, without the first token."""
    return (answer.latency_s - answer.ttft_s) / (answer.num_output_tokens - 1)


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least `part` of `values` do not exceed; of few values, P99 is the largest."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, for benchmarks/results."""
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * (len(heads) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def say(text: str) -> None:
    print(text, flush=True)


def parser(doc: str, rounds: int | None = None, default_model: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that programs share, and have the program stop its nodes when it is killed.

    Args:
        doc: The program's description.
        rounds: The default of --rounds; None: the program has no rounds.
        default_model: The model that is served without --checkpoint; None: the program has no such option.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        made.add_argument("--rounds", type=int, default=rounds)
    if default_model is not None:
        made.add_argument("--checkpoint", type=Path, help=f"default: {default_model}")
    made.add_argument(
        "--seed",
        type=int,
        default=random.randrange(2**31),
        help="random seed of the prompts; default: another one each run",
    )
    made.add_argument("--out", type=Path, help="write every figure here, as JSON")
    return made


def write_report(args: argparse.Namespace, **figures: Any) -> None:
    """Write the machine, the options and `figures` to the file that --out names."""
    if args.out is None:
        return
    options = {key: value if isinstance(value, int | float | list) else str(value) for key, value in vars(args).items()}
    machine = {"processor": processor_name(), "cores": psutil.cpu_count(), "python": platform.python_version()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"machine": machine, "options": options, **figures}, indent=1) + "\n")
    say(f"written to {args.out}")
