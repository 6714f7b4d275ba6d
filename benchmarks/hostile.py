"""Measure what attacks on one model do to the other model's streams, to `/health` and to the gateway's memory:

    python benchmarks/hostile.py --markdown
    python benchmarks/hostile.py --items parts-1 tokenize --seconds 10

Starts a node of two models with `swiftkv serve`. Eight clients stream from one of them; each attack of hostile_items.py
is sent to the other once a second for a minute, with the key of an ordinary client where it needs one. Before and after
each attack there is a calm window of the same streams; an attack's ratio is to these two. If an attack makes the other
engine compute (not if all of it is refused), the two engines share the machine, as they would with ordinary requests.
So the same number of ordinary requests a second is measured first (the controls), and the table also has the ratio to
them.

Attacker, probes and streams are processes of their own. In reality the attacker would be on another machine, so it runs
only when no other process would (SCHED_IDLE). Probes and streams would have machines of their own, too, so they run
before all others where the system permits it (SCHED_RR, as root). The engine that streams has one core, and all other
processes share the rest; with --shared-cores the system decides. With --decoy the attacks go to a server beside the
node that only refuses them (hostile_decoy.py): then the streams show the price of sharing a core with any server. After
a failed attack the node is started anew, so that nothing left behind counts against the next attack.

Asked for: `/health` within 100 ms (P99 50 ms) and always answered; the P99 time between tokens at most 1.2 times the
calm one; the gateway's memory at most 200 MiB above its start; no stream that fails. The result `cores` means that only
the time between tokens is longer, and at most 1.2 times that of the control. The exit status is 1 if an attack failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx
from hostile_items import COMPUTED, CONTROLS, ITEMS, Item, control
from hostile_target import KEY_VARIABLE
from lending_node import free_port, model, parser, pin, quantile, say, table, write_report
from watched_node import DEMO_CHECKPOINTS, GATEWAY, MIB, Monitor, WatchedNode, plain_table

HERE = Path(__file__).parent
STREAMED, ATTACKED = "streamed", "attacked"
MAX_HEALTH_MS = 100.0
P99_HEALTH_MS = 50.0
MAX_RATIO = 1.2
MAX_GROWTH_BYTES = 200 * MIB
_SAMPLE_S = 0.1
_SETTLE_S = 3.0
_CALM_TIMEOUT_S = 60.0
_WARM_UP_S = 5.0
_ATTACKER_END_S = 15.0

Verdict = Literal["pass", "cores", "FAIL", "control"]


@dataclass
class Window:
    """The measurements of one window of some seconds."""

    latencies_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    """The failures of probes and streams, by kind."""

    def __add__(self, other: Window) -> Window:
        failures = {
            key: self.failures.get(key, 0) + other.failures.get(key, 0) for key in self.failures | other.failures
        }
        return Window(self.latencies_s + other.latencies_s, self.gaps_s + other.gaps_s, failures)

    def health_ms(self, part: float) -> float:
        return 1e3 * quantile(self.latencies_s, part) if self.latencies_s else float("inf")

    @property
    def p99_gap_ms(self) -> float:
        """The P99 time between tokens; infinite if no stream went on."""
        return 1e3 * quantile(self.gaps_s, 0.99) if self.gaps_s else float("inf")

    def summary(self) -> dict[str, Any]:
        health = {f"health_ms_{name}": self.health_ms(part) for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1))}
        return {**health, "p99_gap_ms": self.p99_gap_ms, "num_gaps": len(self.gaps_s), "failures": self.failures}


@dataclass(frozen=True)
class Result:
    """One attack, beside the calm around it."""

    item: Item
    calm: Window
    attack: Window
    most_growth_bytes: int
    last_growth_bytes: int
    answers: dict[str, int]
    ended: str = ""
    """The reason why the attack was cut short; empty if it was not."""
    control_gap_ms: float | None = None

    @property
    def ratio(self) -> float:
        return self.attack.p99_gap_ms / self.calm.p99_gap_ms

    @property
    def ratio_to_control(self) -> float | None:
        """The ratio to the control; `None` if the engine computed nothing, and so took no cores from the streams."""
        computed = any(self.answers.get(answer) for answer in COMPUTED)
        return self.attack.p99_gap_ms / self.control_gap_ms if computed and self.control_gap_ms else None

    @property
    def verdict(self) -> Verdict:
        if self.item.name in CONTROLS:
            return "control"
        healthy = self.attack.health_ms(1) <= MAX_HEALTH_MS and self.attack.health_ms(0.99) <= P99_HEALTH_MS
        small = self.most_growth_bytes <= MAX_GROWTH_BYTES
        if not healthy or not small or self.attack.failures or self.ended:
            return "FAIL"
        if self.ratio <= MAX_RATIO:
            return "pass"
        return "cores" if (self.ratio_to_control or MAX_RATIO + 1) <= MAX_RATIO else "FAIL"

    def cells(self) -> list[str]:
        health = " / ".join(f"{self.attack.health_ms(part):.0f}" for part in (0.5, 0.99, 1))
        gaps = f"{self.calm.p99_gap_ms:.1f} / {self.attack.p99_gap_ms:.1f}"
        to_control = "" if self.ratio_to_control is None else f"{self.ratio_to_control:.2f}"
        growth = f"{self.most_growth_bytes / MIB:.0f} / {self.last_growth_bytes / MIB:.0f}"
        failures = ", ".join([*(f"{count} {what}" for what, count in self.attack.failures.items()), self.ended])
        answers = ", ".join(f"{count} {answer}" for answer, count in sorted(self.answers.items()))
        verdict = " ".join(filter(None, [self.verdict, f"({failures.strip(', ')})" if failures.strip(", ") else ""]))
        return [self.item.about, health, gaps, f"{self.ratio:.2f}", to_control, growth, answers, verdict]

    def summary(self) -> dict[str, Any]:
        figures = {key: value for key, value in asdict(self).items() if key not in ("item", "calm", "attack")}
        windows = {"calm": self.calm.summary(), "attack": self.attack.summary()}
        return {"item": self.item.name, **windows, **figures, "ratio": self.ratio, "verdict": self.verdict}


HEADS = (
    "attack, once a second",
    "`/health` median / P99 / max, ms",
    "P99 between tokens, calm / attacked, ms",
    "ratio",
    "to control",
    "memory most / after, MiB",
    "answers",
    "",
)


class Clients:
    """A process of hostile_clients.py."""

    def __init__(self, kind: str, url: httpx.URL, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "hostile_clients.py"), kind, url.host, str(url.port), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def take(self) -> dict[str, Any]:
        """End a window, and return its measurements."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        if not (line := self._process.stdout.readline()):
            raise SystemExit("hostile_clients.py has ended")
        taken: dict[str, Any] = json.loads(line)
        return taken

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Decoy:
    """A process of hostile_decoy.py."""

    def __init__(self) -> None:
        self.url = httpx.URL(f"http://127.0.0.1:{free_port()}")
        command = [sys.executable, str(HERE / "hostile_decoy.py"), str(self.url.port)]
        self._process = subprocess.Popen(command)

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Stage:
    """A node with its streams and probes; measures calm and attacked windows."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        options: dict[str, Any] = {"threads": 1, "max_model_len": 8192, "max_num_seqs": 64}
        models = [
            model(STREAMED, args.checkpoint, "64MiB", **options),
            model(ATTACKED, DEMO_CHECKPOINTS / "chat", "64MiB", **options),
        ]
        self.node = WatchedNode("hostile", {"api_key_env": KEY_VARIABLE, "lending": False}, models)

    @contextmanager
    def up(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.node)
            url = httpx.URL(self.node.url)
            self._health = Clients("health", url)
            stack.callback(self._health.stop)
            self._streams = Clients("streams", url, "--model", STREAMED, "--streams", str(self._args.streams))
            stack.callback(self._streams.stop)
            self._attacked_url = url
            if self._args.decoy:
                decoy = Decoy()
                stack.callback(decoy.stop)
                self._attacked_url = decoy.url
                self._pin_to_others(decoy.pid)
            self._pin()
            self._monitor = stack.enter_context(Monitor(lambda: {GATEWAY: self.node.pid}, _SAMPLE_S))
            time.sleep(_WARM_UP_S)
            self._start_rss_bytes = self._monitor.samples(GATEWAY)[-1].rss_bytes
            yield

    def calm(self) -> Window | None:
        """Wait until the node answers as before, and measure a calm window; return `None` if it never does."""
        deadline_s = time.monotonic() + _CALM_TIMEOUT_S
        time.sleep(_SETTLE_S)
        self._take()
        while True:
            time.sleep(1)
            now = self._take()
            is_calm = now.gaps_s and not now.failures and now.health_ms(1) <= P99_HEALTH_MS
            if is_calm:
                break
            if time.monotonic() > deadline_s or self._out_of_hand():
                return None
        time.sleep(self._args.calm)
        return self._take()

    def attack(self, item: Item) -> tuple[Window, dict[str, int], str, float]:
        """Attack; return the measurements, the answers to the sends, why it ended early, and when it began."""
        url = self._attacked_url
        command = [sys.executable, str(HERE / "hostile_items.py"), item.name, url.host, str(url.port), ATTACKED]
        command += ["--seconds", str(self._args.seconds)]
        self._take()
        begin_s = time.monotonic()
        attacker = subprocess.Popen(["chrt", "--idle", "0", *command], stdout=subprocess.PIPE, text=True)
        self._pin_to_others(attacker.pid)
        ended = self._watch(attacker, begin_s + self._args.seconds + _ATTACKER_END_S)
        window = self._take()
        output, _ = attacker.communicate()
        return window, json.loads(output) if output else {}, ended, begin_s

    def growth_bytes(self, since_s: float) -> int:
        """Return by how much the gateway's most memory since `since_s` exceeds that at the start."""
        samples = self._monitor.samples(GATEWAY, since_s)
        return max((usage.rss_bytes for usage in samples), default=self._start_rss_bytes) - self._start_rss_bytes

    def _watch(self, attacker: subprocess.Popen[str], deadline_s: float) -> str:
        """Wait for the attacker's end; return why it was ended early, or an empty string."""
        ended = ""
        while attacker.poll() is None and not ended:
            time.sleep(_SAMPLE_S)
            ended = self._out_of_hand()
            if time.monotonic() > deadline_s:
                ended = "the attacker did not end"
        if ended:
            attacker.kill()
        return ended

    def _out_of_hand(self) -> str:
        """Return why the node has ended, if it has; kill it if it exceeds its memory limit."""
        if not self.node.is_alive():
            return "the node ended"
        if self.growth_bytes(time.monotonic() - 1) <= self._args.memory_limit * MIB:
            return ""
        self.node.kill()
        return f"killed beyond {self._args.memory_limit} MiB"

    def _take(self) -> Window:
        health, streams = self._health.take(), self._streams.take()
        failures = {f"/health: {what}": count for what, count in health["failures"].items()}
        failures |= {f"stream: {what}": count for what, count in streams["failures"].items()}
        return Window(health["latencies_s"], streams["gaps_s"], failures)

    def _pin(self) -> None:
        if self._args.shared_cores or len(self._cores) < 2:
            return
        for name, process in self.node.engines().items():
            pin(process, self._cores[:1] if name == STREAMED else self._cores[1:])
        for pid in (self.node.pid, self._health.pid, self._streams.pid):
            self._pin_to_others(pid)

    def _pin_to_others(self, pid: int) -> None:
        """Keep a process and its future threads off the core of the engine that streams."""
        if self._args.shared_cores or len(self._cores) < 2:
            return
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), self._cores[1:])

    @property
    def _cores(self) -> list[int]:
        return sorted(os.sched_getaffinity(0))


class Program:
    """Runs attacks one after another, with a calm window before and after each, and a new node after each failure."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._control_gaps_ms: dict[int, float] = {}
        self.results: list[Result] = []

    def run(self, items: Sequence[Item]) -> None:
        left = list(items)
        while left:
            stage = Stage(self._args)
            with stage.up():
                before = stage.calm()
                if before is None:
                    raise SystemExit(f"the streams are not calm without an attack:\n{stage.node.log_tail()}")
                while left:
                    result, after = self._measure(stage, left.pop(0), before)
                    self.results.append(result)
                    say(" | ".join(result.cells()))
                    if after is None or result.verdict == "FAIL":
                        break
                    before = after

    def _measure(self, stage: Stage, item: Item, before: Window) -> tuple[Result, Window | None]:
        attack, answers, ended, begin_s = stage.attack(item)
        after = stage.calm() if not ended else None
        if after is None and not ended:
            ended = "no calm afterwards"
        most, last = stage.growth_bytes(begin_s), stage.growth_bytes(time.monotonic() - 1)
        calm = before if after is None else before + after
        result = Result(item, calm, attack, most, last, answers, ended)
        if item.name in CONTROLS:
            self._control_gaps_ms[item.same_as] = attack.p99_gap_ms
        return replace(result, control_gap_ms=self._control_gaps_ms.get(item.same_as)), after


def with_controls(items: Sequence[Item]) -> list[Item]:
    """Return the controls that `items` are compared with, and then `items`."""
    return [*(control(number) for number in sorted({item.same_as for item in items})), *items]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--items", nargs="+", choices=[item.name for item in ITEMS], help="default: all")
    arguments.add_argument("--seconds", type=float, default=60, help="seconds of each attack")
    arguments.add_argument("--calm", type=float, default=15, help="seconds of each calm window")
    arguments.add_argument("--streams", type=int, default=8)
    arguments.add_argument(
        "--checkpoint", type=Path, default=DEMO_CHECKPOINTS / "code", help="checkpoint of the model that streams"
    )
    arguments.add_argument("--shared-cores", action="store_true", help="let all processes run on all cores")
    arguments.add_argument("--decoy", action="store_true", help="attack a server beside the node")
    arguments.add_argument(
        "--memory-limit", type=int, default=4096, help="MiB of growth beyond which the node is killed"
    )
    arguments.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    args = arguments.parse_args()
    os.environ[KEY_VARIABLE] = "a-key-for-hostile-clients"
    program = Program(args)
    items = [item for item in ITEMS if args.items is None or item.name in args.items]
    try:
        program.run(with_controls(items))
    finally:
        rows = [result.cells() for result in program.results]
        say("\n" + (table(HEADS, rows) if args.markdown else plain_table(HEADS, rows)))
        write_report(args, results=[result.summary() for result in program.results])
    sys.exit(any(result.verdict == "FAIL" for result in program.results))


if __name__ == "__main__":
    main()
