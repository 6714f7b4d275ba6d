"""`swiftkv lending`: see what the models of a running node lend and borrow, and set their budgets."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from typing import Annotated

import typer

from swiftkv.admin_client import (
    DEFAULT_ADMIN_KEY_ENV,
    DEFAULT_URL,
    EXIT_USAGE,
    AdminKeyEnv,
    Url,
    admin_path,
    ask_admin,
)

lending_app = typer.Typer(help="See and set what workers lend, while a node runs.", no_args_is_help=True)

_WATCH_INTERVAL_S = 1.0


@lending_app.command(
    "show", epilog="Examples: `swiftkv lending show --url http://127.0.0.1:8000`, `swiftkv lending show --watch`"
)
def lending_show(
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of GET /admin/lending, as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second, until Ctrl-C.")] = False,
) -> None:
    """Show what every model of a running node lends and borrows."""
    overview = ask_admin("GET", url, "lending", admin_key_env)
    if as_json:
        print(json.dumps(overview, indent=2))
        return
    from swiftkv.lending_tables import lending_tables
    from swiftkv.tables import console_for

    tables = lending_tables(overview)
    with suppress(KeyboardInterrupt):
        console_for(tables).print(tables)
        while watch:
            time.sleep(_WATCH_INTERVAL_S)
            tables = lending_tables(ask_admin("GET", url, "lending", admin_key_env))
            console = console_for(tables)
            console.clear()
            console.print(tables)


@lending_app.command(
    "set",
    epilog="Examples: `swiftkv lending set code 128MiB`, `swiftkv lending set code 50% --dry-run`, "
    "`swiftkv lending set code 0`",
)
def lending_set(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The name of the model that lends.")],
    budget: Annotated[str, typer.Argument(metavar="BUDGET", help="The most it lends: 128MiB, 50% of its pool, or 0.")],
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be recalled.")] = False,
) -> None:
    """Set the most that WORKER lends, until the node stops. Returns when all memory lent beyond BUDGET is back."""
    from swiftkv.model_config import BUDGET_FORMS
    from swiftkv.units import format_size, parse_budget

    try:
        parse_budget(budget)
    except ValueError:
        print(f"swiftkv: BUDGET '{budget}' is not {BUDGET_FORMS}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    query = "?dry_run=true" if dry_run else ""
    change = ask_admin("PATCH", url, f"{admin_path('lending', worker)}{query}", admin_key_env, {"budget": budget})
    size = {key: format_size(change[key]) for key in ("budget_bytes", "lent_bytes", "recalled_bytes")}
    if dry_run:
        print(f"{worker} would lend up to {size['budget_bytes']}; {size['recalled_bytes']} would be recalled")
        return
    print(f"{worker} lends up to {size['budget_bytes']}, {size['lent_bytes']} at the moment")
    if change["recalled_bytes"]:
        print(f"{size['recalled_bytes']} came back in {change['took_s']:.3f} s")
