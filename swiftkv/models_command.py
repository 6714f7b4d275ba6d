"""`swiftkv models`: add models to a running node, remove them, load them anew, put them to sleep and wake them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

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

models_app = typer.Typer(
    help="Add, remove, reload, put to sleep and wake models while a node runs.", no_args_is_help=True
)

Timeout = Annotated[str, typer.Option(help="How long to wait for requests in flight: 500ms, 60s, 2m.")]
Now = Annotated[bool, typer.Option("--now", help="Abort requests in flight.")]


@models_app.command("start", epilog="Example: `swiftkv models start chat`")
def models_start(model: Model, url: Url = DEFAULT_URL, admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV) -> None:
    """Start MODEL, whose engine stays down because it died too often or could not load its weights."""
    ask_admin("POST", url, admin_path("models", model, "start"), admin_key_env)
    print(f"{model} is being started; `swiftkv status` shows when it serves")


@models_app.command(
    "sleep", epilog="Examples: `swiftkv models sleep code`, `swiftkv models sleep code --level 2 --timeout 5m`"
)
def models_sleep(
    model: Model,
    level: Annotated[
        int,
        typer.Option(
            min=1, max=2, help="1: give up the weights, keep the KV and lend all of it. 2: end the process, too."
        ),
    ] = 1,
    timeout: Timeout = "30s",
    now: Now = False,
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
) -> None:
    """Put MODEL to sleep when its requests in flight have ended. Other models can use its memory until it is woken."""
    path = f"{admin_path('models', model, 'sleep')}?level={level}&{_patience(timeout, now)}"
    change = ask_admin("POST", url, path, admin_key_env, timeout_s=None)
    _tell(model, change)


@models_app.command("wake", epilog="Example: `swiftkv models wake code`")
def models_wake(model: Model, url: Url = DEFAULT_URL, admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV) -> None:
    """Wake MODEL, and return when it serves."""
    change = ask_admin("POST", url, admin_path("models", model, "wake"), admin_key_env, timeout_s=None)
    _tell(model, change)


@models_app.command(
    "add",
    epilog="Examples: `swiftkv models add code.yaml`, `swiftkv models add models/Qwen3-0.6B`",
)
def models_add(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A model's section of a node's file, as YAML, or the directory of a model."
        ),
    ],
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
) -> None:
    """Start the model of FILE in a running node, and return when it serves. If that fails, the node is as it was."""
    from swiftkv.config import read_model

    with mistakes_of_a_file():
        section = read_model(file)
    change = ask_admin("POST", url, "models", admin_key_env, section, timeout_s=None)
    _tell(change["model"], change)


@models_app.command("remove", epilog="Example: `swiftkv models remove code --timeout 5m`")
def models_remove(
    model: Model,
    timeout: Timeout = "30s",
    now: Now = False,
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
) -> None:
    """End MODEL when its requests in flight have ended and its lent memory is back; the node forgets it."""
    path = f"{admin_path('models', model)}?{_patience(timeout, now)}"
    change = ask_admin("DELETE", url, path, admin_key_env, timeout_s=None)
    print(f"{model} is removed after {change['took_s']:.1f} s")


@models_app.command("reload", epilog="Example: `swiftkv models reload code --timeout 5m`")
def models_reload(
    model: Model,
    timeout: Timeout = "30s",
    now: Now = False,
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
) -> None:
    """Serve MODEL from the files that are in its directory now, and return when it serves."""
    path = f"{admin_path('models', model, 'reload')}?{_patience(timeout, now)}"
    change = ask_admin("POST", url, path, admin_key_env, timeout_s=None)
    _tell(model, change)


def _tell(model: str, change: dict[str, Any]) -> None:
    print(f"{model} is {change['state']} after {change['took_s']:.1f} s")


def _patience(timeout: str, now: bool) -> str:
    return f"timeout={quote(timeout, safe='')}&now={'true' if now else 'false'}"
