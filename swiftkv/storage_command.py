"""`swiftkv storage`: see the storage of the models of a running node, attach it and detach it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from swiftkv.admin_client import (
    DEFAULT_ADMIN_KEY_ENV,
    DEFAULT_URL,
    AdminKeyEnv,
    Model,
    Url,
    admin_path,
    ask_admin,
    mistakes_of_a_file,
)

storage_app = typer.Typer(help="See, attach and detach the storage of models, while a node runs.", no_args_is_help=True)

_TIMEOUT_S = 150.0


@storage_app.command("show", epilog="Example: `swiftkv storage show`")
def storage_show(
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of GET /admin/storage, as JSON.")] = False,
) -> None:
    """Show the storage that is attached to every model, and its state."""
    overview = ask_admin("GET", url, "storage", admin_key_env)
    if as_json:
        print(json.dumps(overview, indent=2))
        return
    from swiftkv.tables import console_for, plain_table

    table = plain_table(("", "storage", "state", "write_policy", "prefetch_policy"))
    for model in overview["models"]:
        keys = ("backend", "state", "write_policy", "prefetch_policy")
        table.add_row(model["model"], *(model[key] or "-" for key in keys))
    console_for(table).print(table)


@storage_app.command("attach", epilog="Example: `swiftkv storage attach chat storage.yaml`")
def storage_attach(
    model: Model,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A tiers.storage section in YAML, TOML or JSON. The node opens the paths in it."
        ),
    ],
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
) -> None:
    """Attach the storage of FILE to MODEL, until the node stops. Requests in flight go on."""
    from swiftkv.storage_options import read_options

    with mistakes_of_a_file():
        section = read_options(str(file), "FILE", Path.cwd())
    path = admin_path("storage", model, "attach")
    change = ask_admin("POST", url, path, admin_key_env, section, timeout_s=_TIMEOUT_S)
    print(f"{model} has {change['backend']} storage after {change['took_s']:.1f} s")


@storage_app.command("detach", epilog="Example: `swiftkv storage detach chat`")
def storage_detach(model: Model, url: Url = DEFAULT_URL, admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV) -> None:
    """Detach the storage of MODEL until the node stops. Its blocks are kept, and requests in flight go on."""
    change = ask_admin("POST", url, admin_path("storage", model, "detach"), admin_key_env, timeout_s=_TIMEOUT_S)
    print(f"{model} has no storage after {change['took_s']:.1f} s")
