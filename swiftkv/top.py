"""`swiftkv top`: the answer of `GET /admin/overview` as a table, every second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from swiftkv.tables import plain_table
from swiftkv.units import format_size

_BAR_CELLS = 48
_STATES = (("used", "blue"), ("cached", "cyan"), ("streaming", "magenta"), ("free", "bright_black"), ("lent", "yellow"))


def overview_table(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> RenderableType:
    """Return a view of the node; rates and waits cover the time since `before`."""
    figures = ("run", "wait", "cores", "tok/s", "prompt/s", "first", "between", "cached", "borrowed")
    table = plain_table(("", "state"), figures)
    pools = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    seconds = now["time_s"] - before["time_s"] if before else 0.0
    earlier = {model["model"]: model for model in before["models"]} if before else {}
    for model in now["models"]:
        table.add_row(*_cells(model, earlier.get(model["model"]), seconds))
        pools.add_row(model["model"], _pool(model), format_size(model["lending"]["pool_bytes"]))
    legend = Text()
    for state, colour in _STATES:
        legend.append("█", colour).append(f" {state}  ")
    return Group(table, "", pools, "", legend)


def _cells(model: Mapping[str, Any], old: Mapping[str, Any] | None, seconds: float) -> Sequence[str]:
    figures, borrowed_bytes = model["figures"], model["lending"]["borrowed_bytes"]
    words = [model["model"], model["engine"]["state"]]
    borrowed = format_size(borrowed_bytes) if borrowed_bytes else "-"
    if figures is None:
        return [*words, *["-"] * 8, borrowed]
    return [
        *words,
        f"{figures['running']:,}",
        f"{figures['waiting']:,}",
        _cores(model, old, seconds),
        _rate(model, old, "generation_tokens_total", seconds),
        _rate(model, old, "prompt_tokens_total", seconds),
        _mean_wait(model, old, "first_token"),
        _mean_wait(model, old, "between_tokens"),
        _hit_part(figures),
        borrowed,
    ]


def _cores(model: Mapping[str, Any], old: Mapping[str, Any] | None, seconds: float) -> str:
    """Return the cores that a model's engine has taken on average."""
    figures = model["figures"]
    if old is None or old["figures"] is None or figures["core_s_total"] is None or seconds <= 0:
        return "-"
    return f"{max(0.0, figures['core_s_total'] - old['figures']['core_s_total']) / seconds:.1f}"


def _rate(model: Mapping[str, Any], old: Mapping[str, Any] | None, key: str, seconds: float) -> str:
    if old is None or old["figures"] is None or seconds <= 0:
        return "-"
    return f"{max(0, model['figures'][key] - old['figures'][key]) / seconds:,.0f}"


def _mean_wait(model: Mapping[str, Any], old: Mapping[str, Any] | None, key: str) -> str:
    if old is None or model[key]["count"] <= old[key]["count"]:
        return "-"
    wait_s = (model[key]["total_s"] - old[key]["total_s"]) / (model[key]["count"] - old[key]["count"])
    return f"{1000 * wait_s:,.0f} ms" if wait_s < 1 else f"{wait_s:,.1f} s"


def _hit_part(figures: Mapping[str, Any]) -> str:
    asked = figures["prefix_query_tokens_total"]
    return f"{sum(figures['prefix_hit_tokens_total'].values()) / asked:.0%}" if asked else "-"


def _pool(model: Mapping[str, Any]) -> Text:
    """Return the blocks of a pool by state, all KV groups together, as a bar."""
    counts = _blocks(model)
    total = sum(counts.values())
    bar = Text()
    done = shown = 0
    for state, colour in _STATES:
        done += counts[state]
        cells = round(_BAR_CELLS * done / total) - shown if total else 0
        bar.append("█" * cells, colour)
        shown += cells
    return bar


def _blocks(model: Mapping[str, Any]) -> dict[str, int]:
    groups = model["lending"]["groups"]
    if groups is None:
        blocks = model["figures"]["blocks"] if model["figures"] else {"free": 0, "used": 0, "cached": 0}
        return {**blocks, "lent": 0, "streaming": 0}
    counts = {state: sum(group[state] for group in groups) for state in ("free", "used", "cached", "lent")}
    streaming = sum(group[state] for group in groups for state in ("in_flight", "staging", "loading"))
    return {**counts, "streaming": streaming}
