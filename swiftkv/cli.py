"""The `swiftkv` command. What a subcommand needs is imported when it runs: `--help` and `plan` start without torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from swiftkv import __version__
from swiftkv.admin_key import find_admin_key
from swiftkv.checkpoint import Architecture, Size
from swiftkv.errors import ConfigError, SwiftkvError

if TYPE_CHECKING:
    from rich.table import Table

    from swiftkv.cache.plan import LendingPair, MasterRoom, ModelPlan
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
lending_app = typer.Typer(help="See and set what workers lend, while a node runs.", no_args_is_help=True)
app.add_typer(lending_app, name="lending")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(bench_app, name="bench")

Url = Annotated[str, typer.Option(help="Where the node listens.")]
AdminKeyEnv = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Variable that holds the admin key, if the node was given one.",
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_ADMIN_KEY_ENV = "SWIFTKV_ADMIN_KEY"

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
    no_lending: Annotated[
        bool, typer.Option("--no-lending", help="Lend and borrow nothing, whatever the file says.")
    ] = False,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Let other machines in without an API key.")
    ] = False,
) -> None:
    """Start every model of CONFIG and serve until told to stop (Ctrl-C or SIGTERM)."""
    overrides = {
        "host": host,
        "port": port,
        "lending": False if no_lending else None,
        "allow_unauthenticated": True if allow_unauthenticated else None,
    }
    with _mistakes_as_lines(config_path):
        from swiftkv.cache.plan import plan_node
        from swiftkv.config import load_config

        config = load_config(config_path, **overrides)
        config.node.check_access()  # before anything is fetched
        plans = plan_node(config, need_weights=True)
        from swiftkv.node import run_node

        run_node(config, plans)


@app.command(epilog="Example: `swiftkv plan configs/embedded.yaml --json | jq '.lending.masters[].with_lending'`")
def plan(
    config_path: ConfigPath,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: one JSON object.")] = False,
) -> None:
    """Show sizes of every model of CONFIG and what masters can borrow, from config.json alone; nothing is started."""
    with _mistakes_as_lines(config_path):
        from swiftkv.cache.plan import lending_as_dict, plan_as_dict, plan_lending, plan_node
        from swiftkv.config import load_config

        config = load_config(config_path)
        plans = plan_node(config, need_weights=False)
        rooms = plan_lending(plans) if config.node.lending.enabled else ()
        if as_json:
            models = [plan_as_dict(model_plan) for model_plan in plans]
            transports = [{"memory": memory, "choice": choice} for memory, choice in _transports(config, plans)]
            print(json.dumps({"models": models, "lending": lending_as_dict(rooms), "transports": transports}, indent=2))
        else:
            _print_plan(config, plans)
            _print_lending(rooms)
            for memory, choice in _transports(config, plans):
                print(f"\nLending in the memory of {memory} goes over {choice}.")
            for line in _unreached(config, plans):
                print(f"\n{line}")
            if not config.node.lending.enabled:
                print("\nNothing is lent: node.lending is off.")


def _transports(config: Config, plans: tuple[ModelPlan, ...]) -> Iterator[tuple[str, str]]:
    """Whose memory, and what KV is lent over there and why; of GPUs only where they are."""
    from swiftkv.cache.plan import plan_lending
    from swiftkv.transport.topology import node_transports, read_topology

    pairs = [(p.worker.device, p.master.device) for r in plan_lending(plans) for p in r.pairs if p.can_lend]
    topology = read_topology() if any(device != "cpu" for pair in pairs for device in pair) else None
    if topology is not None and not topology.gpus:
        yield "GPUs", f"what reaches, which only the machine that has them can tell ({topology.absence})"
        pairs = [pair for pair in pairs if pair == ("cpu", "cpu")]
    for memory, choice in node_transports(config.node.lending.transport, pairs, topology).items():
        yield memory, f"{choice.kind}: {choice.reason}"


def _unreached(config: Config, plans: tuple[ModelPlan, ...]) -> Iterator[str]:
    """Pairs that do not lend because one is on a GPU and the other is not."""
    if config.node.lending.enabled:
        for master in (plan for plan in plans if plan.role == "master"):
            for worker in (plan for plan in plans if plan.budget_bytes is not None):
                if worker.on_gpu != master.on_gpu:
                    yield (
                        f"{worker.name} ({worker.device}) does not lend to {master.name} ({master.device}): KV that "
                        "passes between the host and a GPU is not streamed in this version."
                    )


def _print_plan(config: Config, plans: tuple[ModelPlan, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    from swiftkv.config import format_size

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for model_plan in plans:
        table.add_column(model_plan.name, justify="right")
    divided = any(p.tensor_parallel_size > 1 for p in plans)
    rows = {
        "architecture": [p.architecture for p in plans],
        "role": [p.role for p in plans],
        **({"ranks, each with": [str(p.tensor_parallel_size) for p in plans]} if divided else {}),
        "weights": [f"{format_size(p.weight_bytes)} {p.dtype}" for p in plans],
        **({"device": [p.device for p in plans]} if any(p.on_gpu for p in plans) else {}),
        "KV cache": [_pool_size(p) for p in plans],
        "blocks": [_once_known(p, f"{p.num_blocks:,} of {p.block_size} tokens") for p in plans],
        "block": [format_size(p.block_bytes) for p in plans],
        "layer block": [" + ".join(format_size(group.layer_block_bytes) for group in p.groups) for p in plans],
        "layers": [" + ".join(str(group.num_layers) for group in p.groups) for p in plans],
        "KV per token": [format_size(p.bytes_per_token) for p in plans],
        "tokens cached": [_once_known(p, f"{p.pool_tokens:,}") for p in plans],
        "longest context": [_once_known(p, f"{p.longest_context:,}") for p in plans],
        "max_model_len": [f"{p.max_model_len:,}" for p in plans],
    }
    for label, cells in rows.items():
        table.add_row(label, *cells)
    console = Console()
    console.print(table)
    total_bytes = sum(p.tensor_parallel_size * (p.pool_bytes + p.weight_bytes) for p in plans)
    console.print(f"\n{len(plans)} models, {format_size(total_bytes)} of weights and KV cache together.")


def _once_known(plan: ModelPlan, cell: str) -> str:
    return cell if plan.device_part is None else "known at start"


def _pool_size(plan: ModelPlan) -> str:
    """A part of a GPU is what weights and activations leave of it, which the engine measures."""
    from swiftkv.config import format_size

    if plan.device_part is None:
        return format_size(plan.pool_bytes)
    return f"rest of {float(plan.device_part):.0%} of {plan.device}"


def _print_lending(rooms: Sequence[MasterRoom]) -> None:
    from rich.console import Console

    console = Console()
    for room in rooms:
        others = f" (every budget is divided among {len(rooms)} masters)" if len(rooms) > 1 else ""
        console.print(f"\n{room.master.name} borrows{others}:", highlight=False)
        console.print(_lending_table(room))
        for note in _lending_notes(room):
            console.print(f"- {note}", highlight=False)


def _lending_table(room: MasterRoom) -> Table:
    """A column for each pair, between the master without lending and, if there are several, with all of them."""
    from rich.table import Table

    from swiftkv.config import format_size

    pairs = room.pairs
    shared = any(pair.share < 1 for pair in pairs)
    table = Table(box=None, padding=(0, 2, 0, 0))
    together = [room] if len(pairs) > 1 else []
    for label in ("", "no lending", *(_pair_name(pair) for pair in pairs), *("together" for _ in together)):
        table.add_column(label, justify="right" if label else "left")
    for label, cells in {
        "block of the worker": [format_size(p.extent.lender_block_bytes) for p in pairs],
        "block of the master": [format_size(p.extent.borrower_block_bytes) for p in pairs],
        "extent": [format_size(p.extent.num_bytes) for p in pairs],
        "extent is": ["the LCM" if p.extent.is_lcm else f"{float(p.extent.waste):.2%} waste" for p in pairs],
        "MEU_w (worker blocks)": [f"{p.extent.meu_w:,}" for p in pairs],
        "MEU_m (master blocks)": [f"{p.extent.meu_m:,}" for p in pairs],
        "lending budget": [f"{100 * float(p.worker.budget_part):.4g}%" for p in pairs],
        **({"share of the budget": [f"{100 * float(p.share):.4g}%" for p in pairs]} if shared else {}),
        "extents lent": [f"{p.num_extents:,} of {p.max_extents:,}" for p in pairs],
    }.items():
        table.add_row(label, "", *cells)
    lent_bytes = [*(pair.lent_bytes for pair in pairs), *(r.lent_bytes for r in together)]
    table.add_row("bytes lent", "", *(format_size(num_bytes) for num_bytes in lent_bytes))

    rooms = [(room.beside(), 0), *((room.beside(p.worker), p.master_group) for p in pairs), *((r, 0) for r in together)]
    for label, cells in {
        "K_i (master blocks)": [f"{r.borrowed_blocks(group):,}" for r, group in rooms],
        "N_LSC": [f"{r.split(group)[0]:,}" for r, group in rooms],
        "N_RC": [f"{r.split(group)[1]:,}" for r, group in rooms],
        "tokens that fit": [f"{r.sequence_tokens:,}" for r, _ in rooms],
        "longest context": [f"{r.longest_context:,}" for r, _ in rooms],
    }.items():
        table.add_row(label, *cells)
    for label, extents in (("one extent less", -1), ("one extent more", 1)):
        table.add_row(label, "", *(_change_in_tokens(room, pair, extents) for pair in pairs))
    return table


def _pair_name(pair: LendingPair) -> str:
    several = len(pair.worker.groups) > 1 or len(pair.master.groups) > 1
    return f"{pair.worker.name} {pair.worker_group}>{pair.master_group}" if several else pair.worker.name


def _change_in_tokens(room: MasterRoom, pair: LendingPair, extents: int) -> str:
    tokens = room.sequence_tokens_after(pair, extents)
    return "-" if tokens is None else f"{tokens - room.sequence_tokens:+,} tokens"


def _lending_notes(room: MasterRoom) -> Iterator[str]:
    alone, model_limit = room.beside(), room.master.max_context_len
    if alone.sequence_tokens:
        times = room.sequence_tokens / alone.sequence_tokens
        yield f"{room.sequence_tokens:,} tokens of one sequence fit, {times:.2f} times those without lending"
    if room.sequence_tokens > model_limit:
        yield f"{room.master.name} itself was made for {model_limit:,} tokens"
    for pair in room.pairs:
        if pair.num_extents == 0:
            yield f"{_pair_name(pair)} lends nothing: {_why_not(pair)}"
    if room.cached_tokens > room.sequence_tokens:
        yield f"{room.cached_tokens:,} tokens of several sequences fit: one alone is limited by N_LSC"


def _why_not(pair: LendingPair) -> str:
    if pair.worker.budget_bytes is None:
        return "it has no lending.budget"
    if not pair.can_lend:
        return "an extent is larger than its pool; try another block_size"
    if not pair.worker.budget_bytes:
        return "its lending.budget is 0; `swiftkv lending set` can raise it at run time"
    return "its share of the budget is less than one extent; raise lending.budget or try another block_size"


@app.command(epilog="Example: `swiftkv status --url http://127.0.0.1:8000`")
def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: what GET /ready answers.")] = False,
) -> None:
    """Ask a running node how its engines do. Exit code 0 if all of them serve."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/ready", timeout=10)
        content = answer.json()
        if as_json:
            print(json.dumps(content, indent=2))
        else:
            _print_engines(content["engines"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        print(f"no node answers at {url}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(0 if answer.is_success else 1)


def _print_engines(engines: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "state"):
        table.add_column(heading)
    for heading in ("for", "in flight", "last progress", "restarts", "process"):
        table.add_column(heading, justify="right")
    for name, engine in engines.items():
        age_s, pid = engine["progress_age_s"], engine["pid"]
        table.add_row(
            name,
            engine["state"],
            _format_age(engine["since_s"]),
            f"{engine['in_flight']:,}",
            "-" if age_s is None else f"{_format_age(age_s)} ago",
            str(engine["restarts"]),
            "-" if pid is None else str(pid),
        )
    console = Console()
    console.print(table)
    for name, engine in engines.items():
        if engine["why"]:
            console.print(f"\n{name}: the engine {engine['why']}", highlight=False)


def _format_age(seconds: float) -> str:
    """Return `4s`, `3m 20s` or `5h 1m`: two units at most."""
    minutes, rest_s = divmod(int(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours}h {rest_minutes}m" if hours else f"{minutes}m {rest_s}s" if minutes else f"{rest_s}s"


@lending_app.command("show", epilog="Example: `swiftkv lending show --url http://127.0.0.1:8000`")
def lending_show(
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
    as_json: Annotated[bool, typer.Option("--json", help="For machines: what GET /admin/lending answers.")] = False,
) -> None:
    """Show what every model of a running node lends and borrows."""
    overview = _ask_admin("GET", url, "lending", admin_key_env)
    if as_json:
        print(json.dumps(overview, indent=2))
    else:
        _print_overview(overview)


@lending_app.command(
    "set",
    epilog="Examples: `swiftkv lending set code 128MiB`, `swiftkv lending set code 50% --dry-run`, "
    "`swiftkv lending set code 0`",
)
def lending_set(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Name of the model that lends.")],
    budget: Annotated[str, typer.Argument(metavar="BUDGET", help="The most it lends: 128MiB, 50% of its pool, or 0.")],
    url: Url = DEFAULT_URL,
    admin_key_env: AdminKeyEnv = DEFAULT_ADMIN_KEY_ENV,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be recalled.")] = False,
) -> None:
    """Set the most that WORKER lends, until the node stops. What it lends beyond that comes back before this ends."""
    from swiftkv.config import BUDGET_FORMS, format_size, parse_budget

    try:
        parse_budget(budget)
    except ValueError:
        print(f"swiftkv: BUDGET '{budget}' is not {BUDGET_FORMS}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None
    query = "?dry_run=true" if dry_run else ""
    path = f"lending/{quote(worker, safe='')}{query}"
    change = _ask_admin("PATCH", url, path, admin_key_env, {"budget": budget})
    size = {key: format_size(change[key]) for key in ("budget_bytes", "lent_bytes", "recalled_bytes")}
    if dry_run:
        print(f"{worker} would lend up to {size['budget_bytes']}; {size['recalled_bytes']} would be recalled")
        return
    print(f"{worker} lends up to {size['budget_bytes']}, {size['lent_bytes']} at the moment")
    if change["recalled_bytes"]:
        print(f"{size['recalled_bytes']} came back in {change['took_s']:.3f} s")


def _ask_admin(method: str, url: str, path: str, admin_key_env: str, body: object = None) -> dict[str, Any]:
    """What `/admin/PATH` answers. Whatever goes wrong is a line on stderr and exit code 1."""
    import httpx

    key = os.environ.get(admin_key_env) or find_admin_key(url)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, f"{url.rstrip('/')}/admin/{path}", json=body, headers=headers, timeout=90)
        content: dict[str, Any] = answer.json()
        if answer.is_success:
            return content
        message = content["error"]["message"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        message = f"no node answers at {url}: {error}; name the one that you mean with --url"
    else:
        if answer.status_code == 401:
            message = f"{message}; export {admin_key_env}=<admin key>, or name another variable with --admin-key-env"
    print(f"swiftkv: {message}", file=sys.stderr)
    raise typer.Exit(1)


def _print_overview(overview: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from swiftkv.config import format_size

    def size(num_bytes: int | None) -> str:
        return "-" if num_bytes is None else format_size(num_bytes)

    console = Console()
    if not overview["enabled"]:
        console.print("Nothing is lent: node.lending is off.")
    models = Table(box=None, padding=(0, 2, 0, 0))
    links = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("", "role", "state"):
        models.add_column(heading)
    for heading in ("pool", "budget", "lent", "borrowed"):
        models.add_column(heading, justify="right")
    for heading in ("lender", "borrower", "state"):
        links.add_column(heading)
    for heading in ("extent", "extents lent", "bytes lent"):
        links.add_column(heading, justify="right")
    for model in overview["models"]:
        sizes = [size(model[key]) for key in ("pool_bytes", "budget_bytes", "lent_bytes", "borrowed_bytes")]
        models.add_row(model["model"], model["role"], model["state"], *sizes)
        for link in model["lends"]:
            lent = link["num_extents"] - link["extents"].get("home", 0)
            links.add_row(
                link["lender"],
                link["borrower"],
                link["peer_state"],
                size(link["extent_bytes"]),
                f"{lent:,} of {link['num_extents']:,}",
                size(link["lent_bytes"]),
            )
    console.print(models)
    if links.row_count:
        console.print()
        console.print(links)
    for model in overview["models"]:
        waits_s = max((link["no_offer_s"] or 0.0 for link in model["lends"]), default=0.0)
        if waits_s:
            console.print(
                f"\n{model['model']} offers nothing more for {waits_s:.0f} s: its own requests needed blocks",
                highlight=False,
            )
        if model["error"]:
            console.print(f"\n{model['error']}", highlight=False)


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
