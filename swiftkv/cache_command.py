"""`swiftkv cache`: see what the caches of a running node hold, why prompts found no more, pin prompts, empty one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from swiftkv.admin_client import (
    DEFAULT_ADMIN_KEY_ENV,
    DEFAULT_URL,
    EXIT_USAGE,
    AdminKeyEnv,
    Model,
    Url,
    admin_path,
    ask_admin,
)
from swiftkv.units import DURATION_PATTERN

cache_app = typer.Typer(
    help="See what prompts find in the caches, pin prompts, and empty a cache.", no_args_is_help=True
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the node's answer as JSON.")]


@cache_app.command("show", epilog="Example: `swiftkv cache show --url http://127.0.0.1:8000`")
def cache_show(
    url: Url = DEFAULT_URL, admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV, as_json: AsJson = False
) -> None:
    """Show what every model's cache holds, and how much of the prompts was found there since its engine started."""
    from swiftkv.tables import console_for, plain_table

    overview = ask_admin("GET", url, "cache", admin_key_env)
    if as_json:
        print(json.dumps(overview))
        return
    figures = ("tokens here", "with peers", "free blocks", "prompt tokens", "found", "from host and storage")
    table = plain_table(("",), figures)
    for model in overview["models"]:
        table.add_row(model["model"], *_cells(model))
    console_for(table).print(table)
    for model in overview["models"]:
        for pin in model["pins"]:
            kept = f"keeps {pin['tokens']:,} tokens" if pin["state"] == "kept" else f"has lost {pin['tokens']:,} tokens"
            print(f"{model['model']} {kept}: pin {pin['pin']}, {pin['seconds_left']:,.0f} s left")


@cache_app.command("why", epilog="Example: `swiftkv cache why 6d1c2f0e5b7a4c3d`")
def cache_why(
    request: Annotated[
        str, typer.Argument(metavar="REQUEST", help="The request's id: the X-Request-Id header of its answer.")
    ],
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
    as_json: AsJson = False,
) -> None:
    """Say why a recent REQUEST found no more of its prompt in the cache."""
    found = ask_admin("GET", url, admin_path("cache", "requests", request), admin_key_env)
    if as_json:
        print(json.dumps(found))
        return
    for match in (found, *found["others"]):
        for sequence in match["sequences"]:
            age_s = sequence["age_s"]
            when = "" if age_s is None else f" ({age_s:.1f} s before)"
            print(
                f"{match['model']}: {sequence['cached_tokens']:,} of {sequence['prompt_tokens']:,} prompt tokens were "
                f"cached: {sequence['reason']}{when}: {sequence['meaning']}"
            )


def _checked_duration(text: str) -> str:
    if not re.fullmatch(DURATION_PATTERN, text):
        raise typer.BadParameter(f"{text!r} is not a duration such as 90s, 30m or 24h")
    return text


@cache_app.command(
    "pin",
    epilog="Examples: `swiftkv cache pin 6d1c2f0e5b7a4c3d --for 8h`, "
    "`swiftkv cache pin --model chat --prompt handbook.json --for 24h`",
)
def cache_pin(
    request: Annotated[
        str | None,
        typer.Argument(
            metavar="REQUEST", help="The request's id: the X-Request-Id header of its answer.", show_default=False
        ),
    ] = None,
    prompt: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file that holds the prompt: text, or JSON with `messages` or `prompt`."),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="The model that keeps --prompt.")] = None,
    time_to_live: Annotated[
        str, typer.Option("--for", callback=_checked_duration, help="How long to keep it, such as 90s, 30m or 24h.")
    ] = "1h",
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
) -> None:
    """Keep the blocks of a prompt that are in a model's pool. The prompt is that of a recent REQUEST, or in a file."""
    body = None
    if request is not None and prompt is None and model is None:
        path = admin_path("cache", "requests", request, "pin")
    elif request is None and prompt is not None and model is not None:
        path, body = admin_path("cache", model, "pin"), _prompt_in(prompt)
    else:
        print("swiftkv: name either a REQUEST, or a model and a prompt: --model NAME --prompt FILE", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE)
    made = ask_admin("POST", url, f"{path}?ttl={quote(time_to_live, safe='')}", admin_key_env, body)
    print(f"{made['model']} keeps {made['tokens']:,} tokens for {made['seconds_left']:,.0f} s: pin {made['pin']}")


@cache_app.command("unpin", epilog="Example: `swiftkv cache unpin chat 3`")
def cache_unpin(
    model: Model,
    pin: Annotated[
        int, typer.Argument(metavar="PIN", min=0, help="The pin's number, which `swiftkv cache show` lists.")
    ],
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
) -> None:
    """End a PIN of MODEL. Its blocks stay cached until others need their room."""
    ask_admin("DELETE", url, admin_path("cache", model, "pins", str(pin)), admin_key_env)
    print(f"{model}: pin {pin} is removed")


@cache_app.command("clear", epilog="Example: `swiftkv cache clear chat`")
def cache_clear(
    model: Model,
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
) -> None:
    """Forget every cached block of MODEL that no running request holds. Tiers below the pool keep theirs."""
    cleared = ask_admin("POST", url, admin_path("cache", model, "clear"), admin_key_env)
    print(f"{model} has forgotten {cleared['blocks']:,} cached blocks")


def _prompt_in(file: Path) -> dict[str, Any]:
    """Return the prompt in a file as the node takes it: a JSON object unchanged, anything else as a text."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"swiftkv: --prompt {file}: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"prompt": text}


def _cells(model: dict[str, Any]) -> list[str]:
    hits = model["hit_tokens_total"]
    found, asked = sum(hits.values()), model["query_tokens_total"]
    share = f"{found / asked:.0%}" if asked else "-"
    figures = (model["tokens"]["local"], model["tokens"]["peer"], model["blocks"]["free"], asked)
    return [*(f"{figure:,}" for figure in figures), share, f"{hits['host'] + hits['storage']:,}"]
