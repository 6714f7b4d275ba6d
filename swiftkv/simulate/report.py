"""The figures of a simulation, and their table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import RenderableType

from swiftkv.simulate.node import NodeOutcome
from swiftkv.simulate.simulator import Outcome
from swiftkv.tables import plain_table
from swiftkv.units import format_size

_QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


@dataclass(frozen=True)
class Targets:
    """The targets of all requests, in seconds; `None` means no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def met(self, outcome: Outcome) -> npt.NDArray[np.bool_]:
        """Return which requests met the targets, [N]."""
        met = np.ones(len(outcome.arrival_s), np.bool_)
        if self.ttft_s is not None:
            met &= outcome.ttft_s <= self.ttft_s
        if self.tpot_s is not None:
            met[np.flatnonzero(outcome.output_tokens > 1)[outcome.tpot_s > self.tpot_s]] = False
        return met


def figures(outcome: Outcome, targets: Targets) -> dict[str, Any]:
    """Return the figures of one model; times in seconds. Raises `ValueError` if no request was served."""
    if not len(outcome.arrival_s):
        raise ValueError(
            "no request of the trace fits the model and has an answer: raise max_model_len, or look at the lengths"
        )
    num_given_up = int(np.isnan(outcome.end_s).sum())
    outcome = outcome.served()
    if not len(outcome.arrival_s):
        raise ValueError("every request waits for memory that no model lends: raise lending.budget or kv_cache.memory")
    elapsed_s = float(outcome.end_s.max() - outcome.arrival_s.min())
    if not elapsed_s:
        raise ValueError("no step takes any time: name step times that a node has measured")
    met, tokens = targets.met(outcome), outcome.input_tokens + outcome.output_tokens
    return {
        "requests": len(outcome.arrival_s),
        "refused": outcome.num_refused,
        "given_up": num_given_up,
        "elapsed_s": elapsed_s,
        "busy_part": outcome.busy_s / elapsed_s,
        "steps": outcome.num_steps,
        "preemptions": outcome.num_preemptions,
        "hit_rate": float(outcome.cached_tokens.sum() / outcome.input_tokens.sum()),
        "input_tokens_per_s": float(outcome.input_tokens.sum()) / elapsed_s,
        "output_tokens_per_s": float(outcome.output_tokens.sum()) / elapsed_s,
        "goodput_requests_per_s": float(met.sum()) / elapsed_s,
        "goodput_tokens_per_s": float(tokens[met].sum()) / elapsed_s,
        "targets_met": float(met.mean()),
        "targets_met_tokens": float(tokens[met].sum() / tokens.sum()),
        "ttft_s": _spread(outcome.ttft_s),
        "tpot_s": _spread(outcome.tpot_s),
        "e2e_s": _spread(outcome.e2e_s),
    }


def node_figures(outcome: NodeOutcome, targets: Targets) -> dict[str, Any]:
    """Return the figures of one of several models; it may have had no requests.

    Raises `ValueError` as `figures` does.
    """
    requests, leases = outcome.requests, outcome.leases
    found: dict[str, Any] = {}
    if len(requests.arrival_s) or requests.num_refused:
        found = figures(requests, targets)
        found["borrowed_hit_rate"] = outcome.borrowed_hit_tokens / int(requests.input_tokens.sum())
        found["copied_blocks"] = outcome.copied_blocks
        found["core_s"] = outcome.core_s
        found["turn_wait_s"] = outcome.waited_s
    if leases is not None:
        most_lent = max(num_bytes for _, num_bytes in leases.lent_bytes)
        most_borrowed = max(num_bytes for _, num_bytes in leases.borrowed_bytes)
        found["lent_bytes"] = {"mean": outcome.mean_lent_bytes, "max": most_lent}
        found["borrowed_bytes"] = {"mean": outcome.mean_borrowed_bytes, "max": most_borrowed}
        found["recalls"] = leases.recalls
    return found


def _spread(seconds: npt.NDArray[np.float64]) -> dict[str, float]:
    if not len(seconds):
        return {}
    quantiles = {name: float(np.quantile(seconds, part)) for name, part in _QUANTILES.items()}
    return {"mean": float(seconds.mean()), **quantiles}


def _mean_size(num_bytes: dict[str, float]) -> str:
    return format_size(round(num_bytes["mean"]))


def as_table(models: dict[str, dict[str, Any]]) -> RenderableType:
    """Return the figures, a column for each model."""
    table = plain_table(("",), models)

    def row(heading: str, key: str, shown: Callable[[Any], str]) -> None:
        if any(key in model for model in models.values()):
            table.add_row(heading, *(shown(model[key]) if key in model else "-" for model in models.values()))

    row("requests", "requests", "{:,}".format)
    row("refused: too long, or no answer", "refused", "{:,}".format)
    row("given up for lack of memory", "given_up", "{:,}".format)
    row("seconds", "elapsed_s", "{:,.0f}".format)
    row("busy", "busy_part", "{:.0%}".format)
    row("prompt tokens from the cache", "hit_rate", "{:.1%}".format)
    row("from borrowed memory", "borrowed_hit_rate", "{:.1%}".format)
    row("lent, mean", "lent_bytes", _mean_size)
    row("borrowed, mean", "borrowed_bytes", _mean_size)
    row("core seconds", "core_s", "{:,.0f}".format)
    row("seconds waited for turns", "turn_wait_s", "{:,.0f}".format)
    row("prompt tokens a second", "input_tokens_per_s", "{:,.1f}".format)
    row("answer tokens a second", "output_tokens_per_s", "{:,.1f}".format)
    row("preemptions", "preemptions", "{:,}".format)
    row("targets met", "targets_met", "{:.1%}".format)
    row("tokens of these", "targets_met_tokens", "{:.1%}".format)
    for heading, key in (("first token", "ttft_s"), ("per token", "tpot_s"), ("whole answer", "e2e_s")):
        for statistic in ("mean", *_QUANTILES):
            cells = [f"{1e3 * model[key][statistic]:,.1f}" if model.get(key) else "-" for model in models.values()]
            table.add_row(f"{heading}, {statistic}, ms", *cells)
    return table
