"""The tables of `swiftkv lending show`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from swiftkv.tables import plain_table
from swiftkv.units import format_size


def lending_tables(overview: dict[str, Any]) -> RenderableType:
    """Return tables of the models, their links and their problems, from the answer of `GET /admin/lending`."""
    parts: list[RenderableType] = []
    if not overview["enabled"]:
        parts.append("Nothing is lent: node.lending is off.")
    parts.append(_models(overview["models"]))
    if any(model["lends"] for model in overview["models"]):
        parts += ["", _links(overview["models"])]
    return Group(*parts, *(f"\n{remark}" for remark in _remarks(overview["models"])))


def _models(models: list[dict[str, Any]]) -> Table:
    table = plain_table(
        ("", "role", "state"), ("pool", "budget", "lent", "borrowed", "blocks in use", "cached", "free")
    )
    for model in models:
        sizes = [_size(model[key]) for key in ("pool_bytes", "budget_bytes", "lent_bytes", "borrowed_bytes")]
        blocks = model["borrowed_blocks"] if model["borrowed_bytes"] else None
        counts = ["-" if blocks is None else f"{blocks[key]:,}" for key in ("used", "cached", "free")]
        table.add_row(model["model"], model["role"], model["state"], *sizes, *counts)
    return table


def _links(models: list[dict[str, Any]]) -> Table:
    table = plain_table(("lender", "borrower", "state"), ("extent", "extents lent", "bytes lent"))
    for link in (link for model in models for link in model["lends"]):
        lent = link["num_extents"] - link["extents"].get("home", 0)
        table.add_row(
            link["lender"],
            link["borrower"],
            link["peer_state"],
            _size(link["extent_bytes"]),
            f"{lent:,} of {link['num_extents']:,}",
            _size(link["lent_bytes"]),
        )
    return table


def _remarks(models: list[dict[str, Any]]) -> Iterator[str]:
    for model in models:
        waits_s = max((link["no_offer_s"] or 0.0 for link in model["lends"]), default=0.0)
        if waits_s:
            yield f"{model['model']} offers nothing more for {waits_s:.0f} s: its own requests needed blocks"
        if model["error"]:
            yield model["error"]


def _size(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else format_size(num_bytes)
