"""Watch a node from outside; hostile.py, chaos.py and soak.py share this.

Everything is read as an operator reads it: processes through /proc, models through `/ready`, pools through `/admin`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from lending_node import Node

from swiftkv.node_config import NodeConfig

MIB = 1 << 20
GATEWAY = "gateway"
DEMO_CHECKPOINTS = Path(__file__).resolve().parents[1] / "checkpoints"

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_KEPT_STATES = ("free", "used", "cached", "lent", "in_flight", "staging", "elsewhere")
_BUSY_STATES = ("used", "in_flight", "borrowed_used", "borrowed_in_flight")
_POLL_S = 0.1


@dataclass(frozen=True)
class Usage:
    """The resources that one process held at one moment."""

    time_s: float
    """On the monotonic clock."""
    pid: int
    rss_bytes: int
    threads: int
    fds: int
    sockets: int


def usage_of(pid: int) -> Usage | None:
    """Read /proc; `None` if the process is gone or goes meanwhile."""
    process = Path("/proc") / str(pid)
    try:
        rss_bytes = int((process / "statm").read_text().split()[1]) * _PAGE_BYTES
        threads = len(os.listdir(process / "task"))
        links = [_link_target(process / "fd" / name) for name in os.listdir(process / "fd")]
    except OSError:
        return None
    if not rss_bytes:  # a process that has ended and waits to be reaped
        return None
    sockets = sum(link.startswith("socket:") for link in links)
    return Usage(time.monotonic(), pid, rss_bytes, threads, len(links), sockets)


def _link_target(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:  # closed since it was listed
        return ""


class Monitor:
    """Samples processes in a thread of its own while the block runs."""

    def __init__(self, processes: Callable[[], Mapping[str, int]], interval_s: float) -> None:
        """`processes` returns the pids by name; it is called before every sample, because engines are started again."""
        self._processes = processes
        self._interval_s = interval_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="monitor", daemon=True)
        self._samples: dict[str, list[Usage]] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def samples(self, name: str, since_s: float = 0.0) -> list[Usage]:
        return [usage for usage in self._samples.get(name, []) if usage.time_s >= since_s]

    def names(self) -> list[str]:
        return list(self._samples)

    def _sample(self) -> None:
        while not self._ended.wait(self._interval_s):
            for name, pid in self._processes().items():
                if usage := usage_of(pid):
                    self._samples.setdefault(name, []).append(usage)


class WatchedNode(Node):
    """A node whose engines may die, hang and come back."""

    @property
    def pid(self) -> int:
        """The process that owns the ports: the gateway."""
        return self.process.pid

    @property
    def models(self) -> Sequence[str]:
        return self._names

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def engines(self) -> dict[str, psutil.Process]:
        """Return the engine processes that exist now, by model."""
        found: dict[str, psutil.Process] = {}
        for child in self._children():
            try:
                command = child.cmdline()
            except psutil.Error:  # it ended meanwhile
                continue
            if "swiftkv.engine.main" in command and command[-1] in self._names:
                found[command[-1]] = child
        return found

    def pids(self) -> dict[str, int]:
        """Return the gateway's pid and those of the engines that exist now."""
        return {GATEWAY: self.pid} | {name: engine.pid for name, engine in self.engines().items()}

    def ready(self) -> dict[str, str]:
        """Return the state of every model as `/ready` has it; empty if the gateway does not answer."""
        try:
            states: dict[str, str] = httpx.get(f"{self.url}/ready", timeout=10).json()["models"]
        except httpx.TransportError:
            return {}
        return states

    def is_ready(self) -> bool:
        states = self.ready()
        return bool(states) and set(states.values()) == {"ready"}

    def admin(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Call a route of `/admin`, whatever its status."""
        return self._http.request(method, f"{self.url}/admin/{path}", headers=self._admin_headers(), **options)

    def pool(self, model: str) -> dict[str, Any] | None:
        """Return `GET /admin/pools/{model}`; `None` if the engine is not there or does not answer."""
        answer = self.admin("GET", f"pools/{model}")
        if answer.status_code != httpx.codes.OK:
            return None
        view: dict[str, Any] = answer.json()
        return view

    def pools(self) -> dict[str, dict[str, Any] | None]:
        return {model: self.pool(model) for model in self._names}

    def kill(self) -> None:
        """End the gateway and its engines at once."""
        for process in (psutil.Process(self.pid), *self._children()):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def log_tail(self, num_bytes: int = 2000) -> str:
        """Return the end of what the node has printed."""
        return (self.directory / "log").read_bytes()[-num_bytes:].decode(errors="replace")

    def _children(self) -> list[psutil.Process]:
        try:
            return list(psutil.Process(self.pid).children())
        except psutil.NoSuchProcess:
            return []


def known_node_options(**options: Any) -> dict[str, Any]:
    """Return the `options` that this version's `node` section has, so that programs run with older versions, too."""
    return {key: value for key, value in options.items() if key in NodeConfig.model_fields}


def pool_problems(pools: Mapping[str, Mapping[str, Any] | None]) -> list[str]:
    """Return the faults of the pools and leases of a node at rest, one sentence each; an empty list if all is well.

    In each pool every block is in exactly one state, nothing is in use, and lenders and borrowers agree on every lease
    and its epoch.
    """
    problems = [f"{model}: its pool cannot be shown" for model, view in pools.items() if view is None]
    lent, held = set[tuple[Any, ...]](), set[tuple[Any, ...]]()
    for model, view in pools.items():
        if view is None:
            continue
        for group in view["groups"]:
            if (kept := sum(group[state] for state in _KEPT_STATES)) != group["total"]:
                problems.append(f"{model}: {kept} blocks are accounted for, of {group['total']}")
            problems += [
                f"{model}: {group[state]} blocks are {state} at rest" for state in _BUSY_STATES if group[state]
            ]
        for side, leases in (("lends", lent), ("borrows", held)):
            for link in view[side]:
                ends = (link["lender"], link["lender_group"], link["borrower"], link["borrower_group"])
                for extent in link["extents"]:
                    if extent["state"] in ("offered", "recalled"):
                        problems.append(f"{model}: extent {extent['extent']} is {extent['state']} at rest")
                    if extent["state"] in ("lent", "held"):
                        leases.add((*ends, extent["extent"], extent["epoch"]))
    for lease in sorted(lent ^ held):
        side = "lent, but not held" if lease in lent else "held, but not lent"
        problems.append(f"{lease[0]} to {lease[2]}: extent {lease[4]} of epoch {lease[5]} is {side}")
    return problems


def problems_at_rest(node: WatchedNode, timeout_s: float) -> list[str]:
    """Wait until the pools are at rest and sane, and return the problems that are left after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while problems := pool_problems(node.pools()):
        if time.monotonic() > deadline_s or not node.is_alive():
            break
        time.sleep(_POLL_S)
    return problems


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose columns line up in a terminal."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = (heads, ["-" * width for width in widths], *rows)
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def wait_until(condition: Callable[[], object], timeout_s: float) -> bool:
    """Poll `condition` until it is true, and return whether that happened in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


@dataclass
class Checks:
    """The checks of a program and whether they passed, for its last table and its exit status."""

    rows: list[list[str]] = field(default_factory=list)
    failed: int = 0

    def add(self, claim: str, holds: bool, found: object, asked: object) -> None:
        self.failed += not holds
        self.rows.append([claim, str(found), str(asked), "pass" if holds else "FAIL"])

    HEADS = ("check", "found", "asked for", "")
