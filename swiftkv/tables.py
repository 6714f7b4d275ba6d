"""Tables of the command line, whose cells are never cut."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

_WIDEST = 1_000  # characters


def plain_table(words: Iterable[str], figures: Iterable[str] = ()) -> Table:
    """Return a table without lines and rows. Columns of `words` are aligned left, those of `figures` right."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in words:
        table.add_column(heading)
    for heading in figures:
        table.add_column(heading, justify="right")
    return table


def console_for(view: RenderableType) -> Console:
    """Return a console on standard output that prints `view` with all its cells whole.

    If the terminal is too narrow for that, lines are longer than it: half a size or half a command misleads.
    """
    console = Console(highlight=False)
    needed = Measurement.get(console, console.options.update(max_width=_WIDEST), view).maximum
    console.width = max(console.width, needed)
    return console
