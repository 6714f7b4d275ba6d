"""The node that the demo starts and talks to."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import openai
import yaml
from rich.console import Console

from swiftkv.admin_key import find_admin_key
from swiftkv.config import Config
from swiftkv.errors import ConfigError, EngineError
from swiftkv.model_config import ModelConfig
from swiftkv.processes import module_command
from swiftkv.sockets import host_in_url

_START_TIMEOUT_S = 300.0
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 1.0  # a node that is starting accepts connections before it answers; the display goes on


class TooLongError(EngineError):
    """A prompt that is longer than the model takes."""


@dataclass(frozen=True)
class PoolCounts:
    """Counts of a borrower's blocks, of those with KV and of all; its own do not include the layer-stream cache."""

    in_own: int
    own: int
    in_borrowed: int
    borrowed: int
    stream: int


class DemoNode:
    """A running node that serves `config`, as a client sees it."""

    def __init__(self, config: Config) -> None:
        ports = [config.node.port, *(model.endpoint.port for model in config.models if model.endpoint)]
        if 0 in ports:
            raise ConfigError("port: the demo needs a fixed port to connect to; write a port number instead of 0")
        self._config = config
        self.url = f"http://{host_in_url(config.node.host)}:{config.node.port}"
        self._api_key = config.node.api_key() or next(iter(config.node.tenant_keys()), "none")

    def base_url(self, model: ModelConfig) -> str:
        if model.endpoint is not None:
            return f"http://{host_in_url(self._config.node.host)}:{model.endpoint.port}/v1"
        return f"{self.url}/models/{model.name}/v1"

    def client(self, model: ModelConfig) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url(model), api_key=self._api_key, max_retries=0, timeout=120)

    def readiness(self) -> tuple[bool, str]:
        """Return whether the node serves, and the state of each model."""
        try:
            response = httpx.get(f"{self.url}/ready", timeout=_ANSWER_TIMEOUT_S)
            models = response.json().get("models") or {}
        except (httpx.HTTPError, ValueError):
            return False, "loading"
        return response.is_success, ", ".join(f"{name} {state}" for name, state in models.items())

    def pages(self, model: ModelConfig, sizes: Sequence[int]) -> list[str]:
        """Return pages of the standard library's text, cut by the model's tokenizer to `sizes` tokens."""
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

    def pool(self, model: ModelConfig) -> PoolCounts:
        groups = self.admin("GET", f"pools/{model.name}")["groups"]

        def total(*states: str) -> int:
            return sum(group[state] for group in groups for state in states)

        holding = ("used", "cached", "in_flight")
        in_borrowed = total(*(f"borrowed_{state}" for state in holding))
        stream = total("staging")
        return PoolCounts(
            total(*holding), total("total") - stream, in_borrowed, in_borrowed + total("borrowed_free"), stream
        )

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


def write_storing_config(path: Path, model: ModelConfig, directory: Path) -> Path | None:
    """Write a copy of a node's file with storage for one of its models; put file and storage in `directory`.

    Return the path of the copy; `None` if that model cannot have storage, or there is no file.
    """
    if path.is_dir() or any(model.why_not_below("storage")):
        return None
    raw = yaml.safe_load(path.read_text())
    for section in raw["models"]:
        beside = path.resolve().parent / section["path"]
        section["path"] = str(beside) if beside.is_dir() else section["path"]
        if section["name"] == model.name:
            storage = {"backend": "file", "path": str(directory / "kv"), "size": "256MiB", "prefetch_threshold": 16}
            section["tiers"] = {"storage": storage}
    to = directory / "node.yaml"
    to.write_text(yaml.safe_dump(raw))
    return to


@contextlib.contextmanager
def as_engine_error(model: str) -> Iterator[None]:
    """Raise `EngineError` for errors of the openai client, `TooLongError` if the prompt is too long."""
    try:
        yield
    except openai.BadRequestError as error:
        if error.code == "context_length_exceeded":
            message = error.body.get("message") if isinstance(error.body, dict) else None
            raise TooLongError(message or str(error)) from error
        raise EngineError(f"{model} refused: {error}") from error
    except openai.OpenAIError as error:
        raise EngineError(f"{model} did not answer: {error}") from error


@contextlib.contextmanager
def serving(path: Path, config: Config, console: Console, *options: str) -> Iterator[DemoNode]:
    """Run a node that serves the file, until the end of the block. Raises `EngineError` if it does not."""
    node = DemoNode(config)
    names = ", ".join(model.name for model in config.models)
    with (
        tempfile.TemporaryFile("w+") as log,
        _process([str(path), *options], log, config.node.shutdown_timeout) as process,
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
            raise EngineError(f"the node stopped during the demo:\n{_read(log)}")
    if process.returncode != 0:
        raise EngineError(f"the node ended with exit code {process.returncode}")
    console.print("the node has stopped\n")


@contextlib.contextmanager
def _process(arguments: list[str], log: IO[str], shutdown_timeout_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Run `swiftkv serve` until the end of the block, or of this process, when it is ended."""
    command = module_command("swiftkv.demo_serve", str(os.getpid()), *arguments)
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


def _read(log: IO[str]) -> str:
    log.seek(0)
    return log.read().strip()
