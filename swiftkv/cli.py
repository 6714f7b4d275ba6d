"""The `swiftkv` command. Subcommands import what they need when they run: `--help` and `plan` start without torch."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from swiftkv import __version__
from swiftkv.admin_client import (
    DEFAULT_URL,
    EXIT_USAGE,
    URL_VARIABLE,
    Url,
    default_url,
    no_answer_errors,
    why_no_answer,
)
from swiftkv.cache_command import cache_app
from swiftkv.chat_command import chat
from swiftkv.checkpoint import Architecture, Size
from swiftkv.cli_watch import page, top
from swiftkv.errors import ConfigError, SwiftkvError
from swiftkv.lending_command import lending_app
from swiftkv.models_command import models_app
from swiftkv.policies import LogLevel, SchedulingPolicy
from swiftkv.storage_command import storage_app
from swiftkv.units import format_age, loading_words

_STATUS_TIMEOUT_S = 10.0

app = typer.Typer(
    name="swiftkv",
    help="Serve several language models from one machine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
checkpoint_app = typer.Typer(help="Make directories with random models.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure a server.", no_args_is_help=True)
app.add_typer(lending_app, name="lending")
app.add_typer(models_app, name="models")
app.add_typer(storage_app, name="storage")
app.add_typer(cache_app, name="cache")
app.add_typer(checkpoint_app, name="checkpoint")
app.add_typer(bench_app, name="bench")

ConfigPath = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="A YAML file such as configs/embedded.yaml, or the directory of a model to serve alone."
    ),
]


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


@app.command(epilog="Example: `swiftkv demo`")
def demo(
    config_path: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="A YAML file to use in place of the demo's own.")
    ] = None,
) -> None:
    """Start two small models, talk to them, let one borrow the other's memory, and stop. Takes a minute."""
    from swiftkv.demo import demo_config, run_demo

    raise typer.Exit(run_demo(config_path or demo_config()))


@app.command(epilog="Examples: `swiftkv serve configs/embedded.yaml --port 9000`, `swiftkv serve models/Qwen3-0.6B`")
def serve(
    config_path: ConfigPath,
    host: Annotated[str | None, typer.Option(help="The address to listen on, in place of node.host.")] = None,
    port: Annotated[int | None, typer.Option(help="The node's port, in place of node.port.")] = None,
    no_lending: Annotated[
        bool, typer.Option("--no-lending", help="Lend and borrow nothing, as with node.lending: off.")
    ] = False,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Serve clients on other machines without an API key.")
    ] = False,
    log_level: Annotated[
        LogLevel | None, typer.Option(help="Log messages of this level and above, in place of node.log_level.")
    ] = None,
) -> None:
    """Start every model of CONFIG and serve until told to stop (Ctrl-C, SIGTERM or SIGHUP)."""
    overrides = {
        "host": host,
        "port": port,
        "lending": False if no_lending else None,
        "allow_unauthenticated": True if allow_unauthenticated else None,
        "log_level": log_level,
    }
    with _mistakes_as_lines(config_path):
        from swiftkv.config import load_config
        from swiftkv.planning.node import plan_node

        config = load_config(config_path, **overrides)
        config.node.check_access()  # before anything is fetched
        plans = plan_node(config, need_weights=True)
        from swiftkv.node import run_node

        run_node(config, plans)


@app.command(epilog="Example: `swiftkv plan configs/embedded.yaml --json | jq '.lending.masters[].with_lending'`")
def plan(
    config_path: ConfigPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show sizes of every model of CONFIG and what masters can borrow, from config.json alone; nothing is started."""
    with _mistakes_as_lines(config_path):
        from swiftkv.config import load_config
        from swiftkv.planning.lending import plan_lending
        from swiftkv.planning.node import plan_node

        config = load_config(config_path)
        plans = plan_node(config, need_weights=False)
        rooms = plan_lending(plans) if config.node.lending.enabled else ()
        if as_json:
            from swiftkv.planning.report import plan_as_dict

            print(json.dumps(plan_as_dict(config, plans, rooms), indent=2))
        else:
            from swiftkv.host_tiers import check_memory
            from swiftkv.planning.advice import small_contexts
            from swiftkv.planning.tables import print_plan

            print_plan(config, plans, rooms)
            for model_config, model_plan in zip(config.models, plans, strict=True):
                for warning in small_contexts(model_config, model_plan):
                    print(f"\n{warning}")
            try:
                check_memory(plans)
            except ConfigError as error:
                print(f"\nthis machine cannot serve it: {error}")


def _checked_target(seconds: float | None) -> float | None:
    if seconds is not None and not 0 < seconds < math.inf:
        raise typer.BadParameter(f"{seconds:g} is not a number of seconds above 0")
    return seconds


@app.command(
    epilog="Example: `swiftkv simulate configs/embedded.yaml --trace conversation_trace.jsonl --step-time http://127.0.0.1:8000`"
)
def simulate(
    config_path: ConfigPath,
    trace: Annotated[
        list[str],
        typer.Option(
            metavar="[NAME=]FILE",
            help="Requests as JSON lines like Mooncake's, or CSV like Azure's. FILE: every model serves all of them, "
            "alone. NAME=FILE, once for each model that has requests: all models run together.",
        ),
    ],
    step_time: Annotated[
        str | None,
        typer.Option(
            metavar="URL|FILE",
            help="Take the times of steps from this running node, or from this file.",
            show_default=f"{URL_VARIABLE}, or {DEFAULT_URL}",
        ),
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Simulate only this model; may be repeated.")] = None,
    rate: Annotated[
        float, typer.Option(min=0.001, help="Send requests this many times as fast as the trace does.")
    ] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Take only this many requests, from the start of the trace.")
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(
            min=1, help="Send the requests from this many clients; each waits for its answer before the next."
        ),
    ] = None,
    policy: Annotated[
        SchedulingPolicy | None, typer.Option(help="The scheduling policy, in place of the file's scheduling_policy.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The random seed that spreads requests with equal timestamps.")] = 0,
    target_ttft: Annotated[
        float | None,
        typer.Option(
            callback=_checked_target, help="Show how many requests get their first token within this many seconds."
        ),
    ] = None,
    target_tpot: Annotated[
        float | None,
        typer.Option(callback=_checked_target, help="Show how many requests take at most this many seconds per token."),
    ] = None,
    save_step_time: Annotated[Path | None, typer.Option(help="Write the times of steps to this file, as JSON.")] = None,
    no_lending: Annotated[
        bool, typer.Option("--no-lending", help="Lend and borrow nothing, as with node.lending: off.")
    ] = False,
    cores: Annotated[
        int | None,
        typer.Option(min=1, help="How many cores the models on the CPU share; default: as many as this machine has."),
    ] = None,
    copy_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="How many bytes of KV are copied per second, such as 6GiB, if the node has never lent."
        ),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With NAME=FILE, plot to this file what was lent and how long requests waited.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Serve traces with the models of CONFIG in virtual time: the real scheduler and cache, predicted step times.

    Models that run together lend to each other and share the cores.
    """
    with _mistakes_as_lines():
        from swiftkv.config import load_config
        from swiftkv.planning.node import plan_node
        from swiftkv.simulate.command import Options, print_figures, simulate_node
        from swiftkv.simulate.report import Targets

        config = load_config(config_path, lending=False if no_lending else None)
        options = Options(
            traces=tuple(trace),
            step_time=step_time or default_url(),
            rate=rate,
            requests=requests,
            clients=clients,
            policy=policy,
            seed=seed,
            targets=Targets(target_ttft, target_tpot),
            save_step_time=save_step_time,
            cores=cores,
            copied_bytes_per_s=None if copy_rate is None else _parse_rate(copy_rate),
            plot=plot,
        )
        result = simulate_node(config, tuple(plan_node(config, need_weights=False)), model or [], options)
        if as_json:
            print(json.dumps(result, indent=2))
        else:
            print_figures(result)


def _parse_rate(text: str) -> int:
    """Return bytes per second. Raises `ConfigError`."""
    from swiftkv.units import parse_size

    try:
        return parse_size(text)
    except ValueError:
        raise ConfigError(f"--copy-rate: {text!r} is not a size; write bytes per second, such as 8GiB") from None


@app.command(epilog="Example: `swiftkv status --url http://127.0.0.1:8000`")
def status(
    url: Url = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of GET /ready, as JSON.")] = False,
) -> None:
    """Show the state of every engine of a running node. The exit code is 0 if all of them serve or sleep."""
    import httpx

    try:
        answer = httpx.get(f"{url.rstrip('/')}/ready", timeout=_STATUS_TIMEOUT_S)
        content = answer.json()
        if as_json:
            print(json.dumps(content, indent=2))
        else:
            _print_engines(content["engines"])
    except no_answer_errors(ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"swiftkv: {why_no_answer(url, error)}", file=sys.stderr)
        raise typer.Exit(1) from None
    raise typer.Exit(0 if answer.is_success else 1)


app.command(epilog="Examples: `swiftkv chat`, `swiftkv chat --model code --quick 'Write a haiku in Python.'`")(chat)
app.command(epilog="Examples: `swiftkv top`, `swiftkv top --once --url http://127.0.0.1:8000`")(top)
app.command(epilog="Examples: `swiftkv page`, `swiftkv page --open`")(page)


@app.command(epilog="Example: `swiftkv doctor`")
def doctor() -> None:
    """Look for what would slow a node down on this machine, or stop it, and say what to do about it."""
    from swiftkv.doctor import examine
    from swiftkv.tables import console_for, plain_table

    findings = tuple(examine())
    table = plain_table(("", "found", "what to do"))
    for finding in findings:
        table.add_row(finding.about, finding.found, "see below" if finding.advice else "ok")
    console_for(table).print(table)
    for finding in findings:
        if finding.advice:
            print(f"\n{finding.about}: {finding.advice}")


def _print_engines(engines: dict[str, dict[str, Any]]) -> None:
    from swiftkv.tables import console_for, plain_table

    table = plain_table(("", "state"), ("for", "in flight", "last progress", "restarts", "process"))
    for name, engine in engines.items():
        age_s, pid = engine["progress_age_s"], engine["pid"]
        table.add_row(
            name,
            engine["state"],
            format_age(engine["since_s"]),
            f"{engine['in_flight']:,}",
            "-" if age_s is None else f"{format_age(age_s)} ago",
            str(engine["restarts"]),
            "-" if pid is None else str(pid),
        )
    console = console_for(table)
    console.print(table)
    for name, engine in engines.items():
        if loading := engine.get("loading"):
            console.print(f"\n{name}: {_describe_loading(loading)}")
        if engine["why"]:
            console.print(f"\n{name}: the engine {engine['why']}")
        if engine.get("storage") == "degraded":
            console.print(
                f"\n{name}: its storage ({engine['storage_backend']}) is degraded: it failed or was slow, and is not "
                "used for a while; prompts are computed meanwhile"
            )


def _describe_loading(loading: dict[str, Any]) -> str:
    """Return how much of its weights an engine has loaded, and when it is expected to have them all."""
    waits = "; it gives way to models that have requests" if loading["gives_way"] else ""
    return loading_words(loading["loaded_bytes"], loading["total_bytes"], loading["left_s"]) + waits


@checkpoint_app.command("make", epilog="Example: `swiftkv checkpoint make --arch qwen3 --size tiny /tmp/tiny-qwen3`")
def checkpoint_make(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The model's directory; it must be empty or not exist.")
    ],
    arch: Annotated[Architecture, typer.Option(help="The model's architecture.")] = "qwen3",
    size: Annotated[Size, typer.Option(help="tiny is for tests; small has the shape of Qwen3-0.6B.")] = "tiny",
) -> None:
    """Make a random-weight model in Hugging Face format, with a tokenizer and a chat template."""
    with _mistakes_as_lines():
        from swiftkv.checkpoint import make

        make(arch, size, directory)
        print(f"made {directory}; serve it with: swiftkv serve {directory}")


@bench_app.command(
    "serve",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    help="Send load to an OpenAI-compatible server, with the flags and figures of `vllm bench serve`; see its --help.",
)
def bench_serve(context: typer.Context) -> None:
    from swiftkv.bench.serve import main as run_bench

    raise typer.Exit(run_bench(context.args))
