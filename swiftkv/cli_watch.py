"""The commands that watch a running node: `swiftkv top` and `swiftkv page`."""

from __future__ import annotations

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
    admin_key,
    ask_admin,
    failures_as_lines,
    request_admin,
)

_LONGEST_INTERVAL_S = 86_400.0


def top(
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
    interval: Annotated[
        float, typer.Option(min=0.1, max=_LONGEST_INTERVAL_S, help="The seconds between two views.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one view, after --interval seconds, and exit.")] = False,
) -> None:
    """Watch a running node: its requests, waits, pools and lending, until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from swiftkv.tables import console_for
    from swiftkv.top import overview_table

    if not once and not sys.stdout.isatty():
        print("swiftkv: standard output is not a terminal; print one view with --once", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    before = ask_admin("GET", url, "overview", admin_key_env)
    if once:
        time.sleep(interval)
        view = overview_table(ask_admin("GET", url, "overview", admin_key_env), before)
        console_for(view).print(view)
        return
    console = Console(highlight=False)
    view = overview_table(before, None)
    # A failure is printed after the live screen has closed, because the screen's text disappears with it.
    with failures_as_lines(), suppress(KeyboardInterrupt), Live(view, console=console, screen=True) as live:
        while True:
            time.sleep(interval)
            now = request_admin("GET", url, "overview", admin_key_env)
            live.update(overview_table(now, before))
            before = now


def page(
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
    show: Annotated[bool, typer.Option("--open", help="Open the page in this machine's browser, too.")] = False,
) -> None:
    """Print the address of a running node's page, with the admin key in it. Keep it to yourself."""
    ask_admin("GET", url, "overview", admin_key_env)  # reports a node that does not answer, or a wrong key
    key = admin_key(url, admin_key_env)
    address = f"{url.rstrip('/')}/#key={key}"
    print(address)
    if show:
        import webbrowser

        if not webbrowser.open(address):
            print("swiftkv: no browser can be opened here; open the address in one", file=sys.stderr)
