"""Cause faults at random under lending traffic, and check that answers are right and untouched models serve on:

    python benchmarks/chaos.py --minutes 10 --markdown

`swiftkv serve` runs a node of a master, whose conversations are longer than its pool, and two workers with requests of
their own. Every five seconds there is one fault: an engine is killed (SIGKILL), ended by a real-time signal, or stopped
for a while, sometimes for longer than the node's watchdog; TMPDIR, where the node's sockets and its log are, or
/dev/shm is full for a while; or a worker's budget changes. The file systems are small ones of the program's own, in a
private mount namespace; where the system does not permit one, the program says so and leaves those faults out.

A node that lends nothing has answered every question before. Checked: no token of any answer is wrong, not even of one
that broke off. No request failed on a model that was left alone: one whose own engine had no fault from some seconds
before the request until its end. After the first minute and at the end the faults cease, and all must be as before:
every model ready and answering, every worker attached, every block of every pool in one state, both sides agreeing on
the leases; and between these two moments neither the gateway nor an engine has grown. The exit status is 1 if a check
failed.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import private_mounts
from chaos_faults import Faults, Outage
from known_answers import Known, Reference, ask, converse
from lending_node import model, parser, quantile, say, table, write_report
from watched_node import (
    DEMO_CHECKPOINTS,
    GATEWAY,
    MIB,
    Checks,
    Usage,
    WatchedNode,
    known_node_options,
    plain_table,
    problems_at_rest,
    usage_of,
    wait_until,
)

MASTER, WORKERS = "chat", ("code", "more")
CHECKPOINTS = {"chat": DEMO_CHECKPOINTS / "chat", "code": DEMO_CHECKPOINTS / "code", "more": DEMO_CHECKPOINTS / "code"}
BUDGET = "75%"
WATCHDOG_S = 10
_MAX_MODEL_LEN = 4096
_CLIENTS = {"chat": 4, "code": 2, "more": 2}
_REQUEST_TIMEOUT_S = 150.0
_MAX_WAIT = "120s"
"""A limit longer than any fault: lending resumes before a request gives up."""
_RECOVERY_TIMEOUT_S = 120.0
_LAST_TRAFFIC_S = 5.0
_FIRST_PHASE_S = 60.0
_MAX_GROWTH = {GATEWAY: (24 * MIB, 4, 8), "engine": (64 * MIB, 4, 8)}
"""The allowed growth of resident memory, threads and open files between two moments of rest; engines restart at
any time, and their pools and caches fill up from there."""


@dataclass(frozen=True)
class Sent:
    """A request that has ended."""

    model: str
    begin_s: float
    end_s: float
    error: str
    is_wrong: bool

    def was_left_alone(self, outages: Sequence[Outage]) -> bool:
        return not any(outage.touches(self.model, self.begin_s, self.end_s) for outage in outages)


class Traffic:
    """Clients that go through known conversations, chosen at random, until they are stopped."""

    def __init__(self, node: WatchedNode, conversations: Mapping[str, Sequence[Sequence[Known]]], seed: int) -> None:
        self._node = node
        self._conversations = conversations
        self._rng = random.Random(seed)
        self._stop = Event()
        self._thread = Thread(target=lambda: asyncio.run(self._run()), name="traffic")
        self.sent: list[Sent] = []

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        async with httpx.AsyncClient(timeout=_REQUEST_TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
            clients = [self._hold(client, name) for name, number in _CLIENTS.items() for _ in range(number)]
            await asyncio.gather(*clients)

    async def _hold(self, client: httpx.AsyncClient, name: str) -> None:
        while not self._stop.is_set():
            for known in self._rng.choice(self._conversations[name]):
                begin_s = time.monotonic()
                answer = await ask(client, self._node.url, name, known)
                is_wrong = known.is_wrong(answer)
                self.sent.append(Sent(name, begin_s, time.monotonic(), answer.error, is_wrong))
                if answer.error:
                    await asyncio.sleep(0.2)
                if self._stop.is_set():
                    break


@dataclass
class Rest:
    """The node after the faults have ceased."""

    usages: dict[str, Usage] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Chaos:
    """The phases of the program, on one node."""

    def __init__(self, node: WatchedNode, conversations: Mapping[str, Sequence[Sequence[Known]]], args: Any) -> None:
        self._node = node
        self._conversations = conversations
        self._interval_s = args.interval
        self._rng = random.Random(args.seed)
        directories = {"full TMPDIR": Path(tempfile.gettempdir()), "full /dev/shm": private_mounts.SHARED_MEMORY}
        self.faults = Faults(node, WORKERS, WATCHDOG_S, directories if args.private else {}, self._rng)
        self.sent: list[Sent] = []

    def phase(self, seconds: float) -> Rest:
        """Run faults and traffic for `seconds`, traffic alone until the node has recovered, then rest."""
        end_s = time.monotonic() + seconds
        with Traffic(self._node, self._conversations, self._rng.randrange(1 << 30)) as traffic:
            while (now_s := time.monotonic()) < end_s and self._node.is_alive():
                self.faults.inject()
                time.sleep(min(self._interval_s, max(0.0, end_s - now_s)))
            problems = self._recover()
            time.sleep(_LAST_TRAFFIC_S)
        self.sent += traffic.sent
        if not self._node.is_alive():
            return Rest(problems=["the node has ended"])
        problems = problems or problems_at_rest(self._node, _RECOVERY_TIMEOUT_S)
        usages = {name: usage for name, pid in self._node.pids().items() if (usage := usage_of(pid))}
        return Rest(usages, problems)

    def _recover(self) -> list[str]:
        """Undo the lasting faults, and return the problems that the node then has."""
        if not self.faults.cease(_RECOVERY_TIMEOUT_S):
            engines = {name: engine.pid for name, engine in self._node.engines().items()}
            return [f"not recovered: /ready says {self._node.ready()}, engines that run: {engines}"]
        for worker in WORKERS:
            answer = self._node.admin("PATCH", f"lending/{worker}", json={"budget": BUDGET})
            if answer.status_code != httpx.codes.OK:
                return [f"{worker}: its budget cannot be set: {answer.text}"]
        if not wait_until(self._all_attached, _RECOVERY_TIMEOUT_S):
            return [f"{worker} is not attached" for worker in WORKERS if not self._is_attached(worker)]
        return []

    def _all_attached(self) -> bool:
        return all(map(self._is_attached, WORKERS))

    def _is_attached(self, worker: str) -> bool:
        return all(link["peer_state"] == "attached" for link in self._node.lending(worker)["lends"])


def make_node() -> WatchedNode:
    shared: dict[str, Any] = {"threads": 1, "max_model_len": _MAX_MODEL_LEN, "max_num_batched_tokens": 512}
    models = [model(MASTER, CHECKPOINTS[MASTER], "4MiB", "master", **shared)]
    lending = {"budget": BUDGET, "window": "1s"}
    models += [model(worker, CHECKPOINTS[worker], "24MiB", lending=lending, **shared) for worker in WORKERS]
    options = {
        "restart": {"limit": 1000, "window": "1s", "backoff": "100ms"},
        "lending": {"max_wait": _MAX_WAIT},
        **known_node_options(watchdog=f"{WATCHDOG_S}s"),
    }
    return WatchedNode("chaos", options, models)


def known_conversations(seed: int) -> dict[str, list[list[Known]]]:
    """Return conversations by model. The master's grow to three times the tokens that its own pool holds."""
    say("asking a node that lends nothing what the right answers are")
    with Reference(sorted(set(CHECKPOINTS.values())), _MAX_MODEL_LEN) as reference:
        long = converse(reference, CHECKPOINTS[MASTER], seed, 8, turns=6, question_tokens=600, max_tokens=96)
        short = converse(reference, CHECKPOINTS["code"], seed, 8, turns=3, question_tokens=200, max_tokens=96)
    return {MASTER: long, **dict.fromkeys(WORKERS, short)}


def judge(chaos: Chaos, first: Rest, last: Rest) -> Checks:
    """Check all claims of the program."""
    checks = Checks()
    sent, outages = chaos.sent, chaos.faults.outages
    wrong = sum(request.is_wrong for request in sent)
    hurt = [request for request in sent if request.error and request.was_left_alone(outages)]
    checks.add("wrong answers", not wrong, wrong, f"0 of {len(sent):,}")
    checks.add("errors of models left alone", not hurt, len(hurt), 0)
    for request in hurt[:5]:
        took_s = request.end_s - request.begin_s
        say(f"{request.model} was left alone, and a request failed after {took_s:.1f} s: {request.error}")
    for name in (MASTER, *WORKERS):
        alone = sum(not request.error and request.was_left_alone(outages) for request in sent if request.model == name)
        checks.add(f"answers of {name} while it was left alone", alone > 0, alone, "> 0")
    checks.add("budget changes that failed for no reason", not chaos.faults.refused, len(chaos.faults.refused), 0)
    for moment, rest in (("after a minute", first), ("at the end", last)):
        checks.add(f"pools, leases and engines {moment}", not rest.problems, len(rest.problems) or "sane", "sane")
        for problem in rest.problems[:10]:
            say(f"{moment}: {problem}")
    for name, before in first.usages.items():
        after = last.usages.get(name)
        if after is not None:
            check_growth(checks, name, before, after)
    return checks


def check_growth(checks: Checks, name: str, before: Usage, after: Usage) -> None:
    most_bytes, most_threads, most_fds = _MAX_GROWTH.get(name, _MAX_GROWTH["engine"])
    grown_bytes = after.rss_bytes - before.rss_bytes
    found = f"{before.rss_bytes / MIB:.0f} to {after.rss_bytes / MIB:.0f} MiB"
    checks.add(f"{name}: memory", grown_bytes <= most_bytes, found, f"+{most_bytes // MIB} MiB at most")
    for what, most in (("threads", most_threads), ("fds", most_fds)):
        count = [getattr(usage, what) for usage in (before, after)]
        checks.add(f"{name}: {what}", count[1] - count[0] <= most, f"{count[0]} to {count[1]}", f"+{most} at most")


def traffic_rows(sent: Sequence[Sent], outages: Sequence[Outage]) -> list[list[str]]:
    rows = []
    for name in (MASTER, *WORKERS):
        of_model = [request for request in sent if request.model == name]
        answered = [request for request in of_model if not request.error]
        times_s = [request.end_s - request.begin_s for request in answered]
        errors = [request for request in of_model if request.error]
        alone = sum(request.was_left_alone(outages) for request in errors)
        times = [f"{quantile(times_s, part):.2f}" if times_s else "" for part in (0.5, 0.99, 1)]
        answers_alone = sum(request.was_left_alone(outages) for request in answered)
        rows.append([name, *map(str, (len(answered), answers_alone, len(errors) - alone, alone)), *times])
    return rows


TRAFFIC_HEADS = (
    "model",
    "answers",
    "of them left alone",
    "errors in a fault",
    "errors left alone",
    "median, s",
    "P99, s",
    "max, s",
)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--minutes", type=float, default=10)
    arguments.add_argument("--interval", type=float, default=5, help="seconds from one fault to the next")
    arguments.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    args = arguments.parse_args()
    args.private = private_mounts.enter()
    if not args.private:
        say("no mount namespace can be made here, so full file systems are not tried")
    to_table = table if args.markdown else plain_table
    conversations = known_conversations(args.seed)
    say(f"seed {args.seed}; faults begin")
    with make_node() as node:
        chaos = Chaos(node, conversations, args)
        seconds = 60 * args.minutes
        first = chaos.phase(min(_FIRST_PHASE_S, seconds / 2))
        say(f"after the first phase: {len(chaos.sent):,} requests, {len(chaos.faults.outages)} faults")
        last = chaos.phase(max(seconds - _FIRST_PHASE_S, seconds / 2)) if node.is_alive() else first
        checks = judge(chaos, first, last)
        if checks.failed:
            say(f"the end of the node's output:\n{node.log_tail()}")
    kinds = Counter(outage.kind for outage in chaos.faults.outages)
    say("\n" + to_table(("fault", "times"), [[kind, str(count)] for kind, count in sorted(kinds.items())]))
    say("\n" + to_table(TRAFFIC_HEADS, traffic_rows(chaos.sent, chaos.faults.outages)))
    say("\n" + to_table(Checks.HEADS, checks.rows))
    write_report(args, checks=checks.rows, faults=kinds, sent=[vars(request) for request in chaos.sent])
    sys.exit(checks.failed > 0)


if __name__ == "__main__":
    main()
