"""The `swiftkv` command. What a subcommand needs is imported when it runs: `--help` and `plan` start without torch."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftkv import __version__
from swiftkv.checkpoint import Architecture, Size
from swiftkv.errors import ConfigError, SwiftkvError

if TYPE_CHECKING:
    from swiftkv.cache.plan import ModelPlan
    from swiftkv.config import Config

app = typer.Typer(
    name="swiftkv",
    help="Serve several language models from one machine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
checkpoint_app = typer.Typer(help="Make model directories.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure a server.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(bench_app, name="bench")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file such as configs/embedded.yaml.")]

EXIT_USAGE = 2
"""The user's mistake: a line on stderr says what to change, and nothing was started."""


@contextmanager
def _mistakes_as_lines(config_path: Path | None = None) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        for line in str(error).splitlines():
            file = "" if config_path is None or line.startswith(str(config_path)) else f"{config_path}: "
            print(f"{file}{line}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    except SwiftkvError as error:
        print(f"swiftkv: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"swiftkv {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Start with: `swiftkv plan configs/embedded.yaml`, then `swiftkv serve configs/embedded.yaml`.",
)
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve several language models from one machine, each at its own OpenAI-compatible endpoint."""


@app.command(epilog="Example: `swiftkv serve configs/embedded.yaml --port 9000`")
def serve(
    config_path: ConfigPath,
    host: Annotated[str | None, typer.Option(help="Listen here, whatever the file says.")] = None,
    port: Annotated[int | None, typer.Option(help="The node's port, whatever the file says.")] = None,
) -> None:
    """Start every model of CONFIG and serve until told to stop (Ctrl-C or SIGTERM)."""
    with _mistakes_as_lines(config_path):
        from swiftkv.cache.plan import plan_node
        from swiftkv.config import load_config

        config = load_config(config_path, host=host, port=port)
        plans = plan_node(config, need_weights=True)
        from swiftkv.node import run_node

        run_node(config, plans)


@app.command(epilog="Example: `swiftkv plan configs/embedded.yaml --json | jq '.models[].num_blocks'`")
def plan(
    config_path: ConfigPath,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")] = False,
) -> None:
    """Show sizes and block counts of every model of CONFIG; nothing is started."""
    with _mistakes_as_lines(config_path):
        from swiftkv.cache.plan import plan_as_dict, plan_node
        from swiftkv.config import load_config

        config = load_config(config_path)
        plans = plan_node(config, need_weights=False)
        if as_json:
            print(json.dumps({"models": [plan_as_dict(model_plan) for model_plan in plans]}, indent=2))
        else:
            _print_plan(config, plans)


def _print_plan(config: Config, plans: tuple[ModelPlan, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    from swiftkv.config import format_size

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for model_plan in plans:
        table.add_column(model_plan.name, justify="right")
    rows = {
        "architecture": [p.architecture for p in plans],
        "role": [p.role for p in plans],
        "weights": [f"{format_size(p.weight_bytes)} {p.dtype}" for p in plans],
        "KV cache": [format_size(p.pool_bytes) for p in plans],
        "blocks": [f"{p.num_blocks:,} of {p.block_size} tokens" for p in plans],
        "block": [format_size(p.block_bytes) for p in plans],
        "layer block": [" + ".join(format_size(group.layer_block_bytes) for group in p.groups) for p in plans],
        "layers": [" + ".join(str(group.num_layers) for group in p.groups) for p in plans],
        "KV per token": [format_size(p.bytes_per_token) for p in plans],
        "tokens cached": [f"{p.pool_tokens:,}" for p in plans],
        "longest context": [f"{p.longest_context:,}" for p in plans],
        "max_model_len": [f"{p.max_model_len:,}" for p in plans],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console = Console()
    console.print(table)
    total_bytes = sum(p.pool_bytes + p.weight_bytes for p in plans)
    console.print(f"\n{len(plans)} models, {format_size(total_bytes)} of weights and KV cache together.")


@app.command(epilog="Example: `swiftkv status --url http://127.0.0.1:8000`")
def status(
    url: Annotated[str, typer.Option(help="Where the node listens.")] = "http://127.0.0.1:8000",
) -> None:
    """Ask a running node which of its models serve. Exit code 0 if all do."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/ready", timeout=10)
        print(json.dumps(answer.json(), indent=2))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        print(f"no node answers at {url}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(0 if answer.is_success else 1)


@checkpoint_app.command("make", epilog="Example: `swiftkv checkpoint make --arch qwen3 --size tiny /tmp/tiny-qwen3`")
def checkpoint_make(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; must be empty or not exist.")],
    arch: Annotated[Architecture, typer.Option(help="Architecture.")] = "qwen3",
    size: Annotated[Size, typer.Option(help="tiny is for tests; small has the shape of Qwen3-0.6B.")] = "tiny",
) -> None:
    """Make a random-weight model in Hugging Face format, with a tokenizer and a chat template."""
    with _mistakes_as_lines():
        from swiftkv.checkpoint import make

        make(arch, size, directory)


@bench_app.command(
    "serve",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Load for an OpenAI-compatible server, with the flags and figures of `vllm bench serve`; see its --help.",
)
def bench_serve(context: typer.Context) -> None:
    from swiftkv.bench.serve import main as run_bench

    raise typer.Exit(run_bench(context.args))


if __name__ == "__main__":
    app()
