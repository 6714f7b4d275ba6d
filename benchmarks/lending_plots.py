"""Draw the reports that the other lending_*.py programs wrote with --out: `pip install swiftkv[bench]`, then

    python benchmarks/lending_plots.py --from benchmarks/out --to docs/images

first_tokens.png        P99 time to first token over the number of conversations, of multiturn-*.json
lending_breakdown.png   where the time to first token goes: queue, load, execute, store (the paper's Figure 10)
lending_cdf.png         how long loads and stores of single requests take (the paper's Figure 11)
lending_elastic.png     what it costs to resize a pool by an extent, beside a layer-major pool (section 3.4)

As in the paper, the breakdown shows loads and stores whole, although they overlap with computing; the titles name
`exposed`, which is the part that does not overlap. Pictures whose reports are missing in --from are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from lending_node import say

mpl.use("Agg")
from matplotlib import pyplot as plt

PHASES = ("queue", "load", "execute", "store")
COLOURS = {"queue": "#9aa5b1", "load": "#2f7ebc", "execute": "#f0b35b", "store": "#4f9d69"}


@dataclass(frozen=True)
class Request:
    """The seconds of one prefill, or sums over several."""

    queue_s: float
    prefill_s: float
    load_s: float
    store_s: float
    exposed_s: float

    @property
    def phases_s(self) -> dict[str, float]:
        """The seconds by phase: loads and stores whole, and executing, which is the prefill less the exposed time."""
        execute_s = max(0.0, self.prefill_s - self.exposed_s)
        return {"queue": self.queue_s, "load": self.load_s, "execute": execute_s, "store": self.store_s}

    @classmethod
    def from_json(cls, spent: dict[str, Any]) -> Request:
        return cls(*(spent[key] for key in ("queue_s", "prefill_s", "load_s", "store_s", "exposed_s")))

    @classmethod
    def added(cls, requests: Sequence[Request]) -> Request:
        columns = zip(*((r.queue_s, r.prefill_s, r.load_s, r.store_s, r.exposed_s) for r in requests), strict=True)
        return cls(*map(sum, columns))


def read(directory: Path, name: str) -> dict[str, Any] | None:
    file = directory / f"{name}.json"
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.exists() else None
    return found


def conversations(multiturn: dict[str, Any]) -> dict[str, list[Request]]:
    """Return the later turns of swiftkv's conversations by scenario, single ones where one was sent at a time."""
    found = {}
    for label, rounds in multiturn["results"].items():
        summaries = [summary for servers in rounds for summary in servers if summary["server"] == "swiftkv"]
        rows = [row["stream"] for summary in summaries for row in summary["rows"] if row["turn"]]
        is_alone = any(row["prefill_s"] for row in rows)
        spent = rows if is_alone else [summary["stream"] for summary in summaries]
        found[label] = [Request.from_json(one) for one in spent]
    return found


def prefills(overlap: dict[str, Any]) -> dict[str, list[Request]]:
    """Return the prefills by load and number of buffers."""
    found: dict[str, list[Request]] = {}
    for one in overlap["prefills"]:
        if one["node"] != "off":
            found.setdefault(f"{one['load']}, {one['node']}", []).append(Request.from_json(one))
    return found


def draw_breakdown(kinds: dict[str, list[Request]], file: Path) -> None:
    """Draw a bar for each kind of request, with the part of its latency that each phase has."""
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(kinds) + 1.6), layout="constrained")
    for place, requests in enumerate(kinds.values()):
        total = Request.added(requests)
        whole_s = sum(total.phases_s.values())
        left = 0.0
        for phase, seconds in total.phases_s.items():
            share = 100 * seconds / whole_s
            axes.barh(place, share, left=left, color=COLOURS[phase], label=None if place else phase)
            left += share
        load, store = (100 * of / whole_s for of in (total.load_s, total.store_s))
        note = f"load {load:.1f} %, store {store:.1f} %, exposed {100 * total.exposed_s / whole_s:.2f} %"
        axes.text(1, place, note, va="center", fontsize=8)
    axes.set_yticks(range(len(kinds)), list(kinds))
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the latency of the prefill, overlap ignored")
    axes.legend(ncols=len(PHASES), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    save(figure, file)


def draw_cdfs(kinds: dict[str, list[Request]], file: Path) -> None:
    """Draw loads on the left and stores on the right, with a curve for each kind that has several requests."""
    figure, both = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained", sharey=True)
    for axes, key, title in zip(both, ("load_s", "store_s"), ("load", "store"), strict=True):
        for label, requests in kinds.items():
            times_ms = np.sort([1e3 * getattr(request, key) for request in requests])
            axes.step(times_ms, np.arange(1, len(times_ms) + 1) / len(times_ms), where="post", label=label)
        axes.set_xlabel(f"{title}, ms per request")
        axes.set_ylim(0, 1.02)
        axes.axhline(0.99, color="grey", linewidth=0.6, linestyle=":")
        axes.grid(alpha=0.3)
    both[0].set_ylabel("part of the requests")
    both[1].legend(fontsize=7, loc="lower right")
    save(figure, file)


def waits(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return (conversations, P99 in seconds) by scenario and server: the median of the rounds, fewest first."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for multiturn in sorted(runs, key=lambda run: int(run["options"]["sessions"])):
        for label, rounds in multiturn["results"].items():
            for summaries in zip(*rounds, strict=True):
                p99_s = statistics.median(summary["p99_ms"] for summary in summaries) / 1e3
                of_server = found.setdefault(label, {}).setdefault(summaries[0]["server"], [])
                of_server.append((multiturn["options"]["sessions"], p99_s))
    return found


def draw_waits(found: dict[str, dict[str, list[tuple[int, float]]]], file: Path) -> None:
    """Draw a panel for each scenario, with a curve for each server."""
    names = {"swiftkv": "swiftkv with lending", "swiftkv alone": "swiftkv without", "vLLM": "vLLM, the same pool"}
    colours = {"swiftkv": "#2f7ebc", "swiftkv alone": "#9aa5b1", "vLLM": "#f0b35b"}
    figure, panels = plt.subplots(1, len(found), figsize=(9, 3.4), layout="constrained", sharey=True, squeeze=False)
    for axes, (label, servers) in zip(panels[0], found.items(), strict=True):
        for server, points in servers.items():
            axes.plot(*zip(*points, strict=True), marker="o", color=colours[server], label=names[server])
        axes.set_title(label, fontsize=10)
        axes.set_xlabel("conversations")
        axes.set_ylim(bottom=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("P99 time to first token, s")
    panels[0][0].legend(fontsize=8)
    save(figure, file)


def draw_elastic(elastic: dict[str, Any], file: Path) -> None:
    """Draw the times to resize a pool, both axes logarithmic."""
    pools = elastic["pools"]
    blocks = [pool["num_blocks"] for pool in pools]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    width = elastic["options"]["layer_block_bytes"]
    for key, label in (
        ("grow_layer_major", f"layer-major grows (layer blocks of {width} B)"),
        ("shrink_layer_major", "layer-major shrinks"),
        ("lend_cached", "lend, from cached blocks"),
        ("lend_free", "lend, from free blocks"),
        ("take_back", "take back"),
        ("borrow", "borrow"),
        ("recall", "recall"),
    ):
        style = "--" if key.endswith("layer_major") else "-"
        axes.plot(blocks, [pool[key] for pool in pools], style, marker="o", markersize=4, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("blocks in the pool")
    axes.set_ylabel("µs per extent of one block")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    figure.savefig(file, dpi=130)
    plt.close(figure)
    say(f"{file}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--from", type=Path, default=Path("benchmarks/out"), dest="source", help="directory with multiturn.json, …"
    )
    arguments.add_argument("--to", type=Path, default=Path("docs/images"), help="directory for the pictures")
    args = arguments.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    multiturn, overlap, elastic = (read(args.source, name) for name in ("multiturn", "overlap", "elastic"))
    kinds: dict[str, list[Request]] = {}
    if multiturn is not None:
        kinds |= {f"conversations, {label}": requests for label, requests in conversations(multiturn).items()}
    if overlap is not None:
        kinds |= prefills(overlap)
    if kinds:
        draw_breakdown(kinds, args.to / "lending_breakdown.png")
    several = {label: requests for label, requests in kinds.items() if len(requests) > 1}
    if several:
        draw_cdfs(several, args.to / "lending_cdf.png")
    runs = [json.loads(file.read_text()) for file in args.source.glob("multiturn-*.json")]
    if runs:
        draw_waits(waits(runs), args.to / "first_tokens.png")
    if elastic is not None:
        draw_elastic(elastic, args.to / "lending_elastic.png")


if __name__ == "__main__":
    main()
