"""The flags of `swiftkv bench serve`: those of `vllm bench serve` that concern serving text."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence

from swiftkv.admin_client import URL_VARIABLE
from swiftkv.bench import report

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")

EXAMPLES = """examples:
  swiftkv bench serve --model chat --tokenizer MODEL_DIR --random-input-len 512 --num-prompts 100 --request-rate 4
  swiftkv bench serve --tokenizer MODEL_DIR --dataset-name multi_turn --num-prompts 8 --max-concurrency 2
  swiftkv bench serve --backend openai-chat --model chat --dataset-name custom --dataset-path questions.jsonl
  swiftkv bench serve --base-url http://127.0.0.1:8001 --tokenizer MODEL_DIR --save-result --goodput ttft:500 tpot:50
MODEL_DIR is the directory or hub id of the model that is served: its tokenizer makes the prompts.
"""


class UsageError(ValueError):
    """A wrong flag, or a server that does not answer: one line that says what would be right."""


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the default of each flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if action.default in (None, [], argparse.SUPPRESS) or action.default is False:
            return text
        return f"{text}; default: %(default)s"


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of the flags of `vllm bench serve` that concern serving text, with its names and defaults."""
    parser = argparse.ArgumentParser(
        prog="swiftkv bench serve",
        usage="swiftkv bench serve [options]",
        description="Send load to an OpenAI-compatible server, with the flags and figures of `vllm bench serve`.",
        epilog=EXAMPLES,
        formatter_class=_HelpFormatter,
    )
    add = parser.add_argument_group("server").add_argument
    add(
        "--backend",
        choices=["openai", "openai-chat", "vllm"],
        default="openai",
        help="send completions, or chat completions",
    )
    add("--base-url", help=f"the server's URL, in place of --host and --port; default: {URL_VARIABLE}")
    add("--host", help="default: 127.0.0.1")
    add("--port", type=int, help="default: 8000")
    add("--endpoint", help="default: /v1/completions, or /v1/chat/completions for openai-chat")
    add("--model", help="default: the first one that the server lists")
    add("--served-model-name", help="the model's name on the server, if --model names the tokenizer")
    add(
        "--tokenizer",
        help="directory or hub id; default: that of the model, as the server or a swiftkv node's /admin tells it",
    )
    add("--skip-tokenizer-init", action="store_true", help="send random token ids below --vocab-size in place of texts")
    add("--vocab-size", type=int, default=4096, help="the number of token ids, with --skip-tokenizer-init")
    add(
        "--header",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="headers of every request; OPENAI_API_KEY is sent if it is set",
    )
    add("--ready-check-timeout-sec", type=float, default=0, help="seconds to wait for a first answer; 0: do not wait")

    add = parser.add_argument_group("load").add_argument
    add("--num-prompts", type=int, default=1000, help="how many prompts, or conversations, to send")
    add("--request-rate", type=float, default=math.inf, help="prompts a second; inf: all at once")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; less: in bursts; more: evenly")
    add("--max-concurrency", type=int, help="the most requests in flight")
    add("--num-warmups", type=int, default=0, help="requests that are sent before the others, and not counted")
    add("--seed", type=int, default=0, help="the random seed of prompts and of the times at which they are sent")
    add("--disable-tqdm", action="store_true", help="no progress bar")

    add = parser.add_argument_group("dataset").add_argument
    names = ["random", "prefix_repetition", "multi_turn", "sharegpt", "custom"]
    add("--dataset-name", choices=names, default="random", help="where prompts come from")
    add("--dataset-path", help="a file: ShareGPT's JSON or, for custom, JSONL with one prompt a line")
    add("--input-len", type=int, help="tokens of a prompt, for any dataset that sets one")
    add("--output-len", type=int, help="tokens of an answer, for any dataset")
    add("--random-input-len", type=int, default=1024, help="tokens of a prompt")
    add("--random-output-len", type=int, default=128, help="tokens of an answer")
    add("--random-range-ratio", type=float, default=0.0, help="the share by which lengths vary, up and down")
    add("--random-prefix-len", type=int, default=0, help="tokens that all prompts share")
    add("--prefix-repetition-prefix-len", type=int, default=256, help="tokens of a shared prefix")
    add("--prefix-repetition-suffix-len", type=int, default=256, help="tokens of a prompt after its prefix")
    add("--prefix-repetition-num-prefixes", type=int, default=10, help="how many prefixes there are")
    add("--prefix-repetition-output-len", type=int, default=128, help="tokens of an answer")
    add("--multi-turn-num-turns", type=int, default=4, help="turns of a conversation")
    add("--multi-turn-first-len", type=int, default=512, help="tokens of the first turn")
    add("--multi-turn-turn-len", type=int, default=64, help="tokens of each later turn")
    add("--multi-turn-output-len", type=int, default=64, help="tokens of an answer")
    add("--sharegpt-output-len", type=int, help="tokens of an answer; default: as many as the recorded one has")
    add("--custom-output-len", type=int, default=256, help="tokens of an answer; -1: the line's output_tokens")
    add("--skip-chat-template", action="store_true", help="send custom prompts as they are")
    add("--disable-shuffle", action="store_true", help="send custom prompts in the order of the file")

    add = parser.add_argument_group("sampling").add_argument
    for name in SAMPLING:
        add(f"--{name.replace('_', '-')}", type=int if name == "top_k" else float)
    add(
        "--ignore-eos",
        action="store_true",
        help="generate the whole output length; always on for random and multi_turn",
    )
    add("--logprobs", type=int, help="how many log-probabilities to ask for with every token")
    add("--extra-body", type=json.loads, metavar="JSON", help="fields to add to every request")

    add = parser.add_argument_group("result").add_argument
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        help=f"metrics to report percentiles of: {','.join(report.METRICS)}",
    )
    add("--metric-percentiles", default="99", help="percentiles to report, such as 50,90,99")
    add(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="targets in milliseconds, such as ttft:500 tpot:50 e2el:2000",
    )
    add("--save-result", action="store_true", help="write the figures as JSON")
    add("--save-detailed", action="store_true", help="write each request's times, text and error, too")
    add("--append-result", action="store_true", help="add the figures to the end of a file that may exist")
    add("--result-dir", help="where to write the figures; default: the current directory")
    add("--result-filename", help="the file's name; default: made of label, rate, model and time")
    add("--label", help="the first part of the file's name; default: the backend")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE", help="keys to add to the JSON")
    return parser


def parse_metrics(text: str) -> list[str]:
    """Return the metrics that `--percentile-metrics` names. Raises `UsageError`."""
    names = text.split(",")
    for name in names:
        if name not in report.METRICS:
            raise UsageError(f"--percentile-metrics: {name!r} is not one of {', '.join(report.METRICS)}")
    return names


def parse_percentiles(text: str) -> list[float]:
    """Return the percentages that `--metric-percentiles` lists. Raises `UsageError`."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise UsageError(f"--metric-percentiles: {text!r} is not a list such as 50,90,99")
    return values


_LEAST = {
    "seed": 0,
    "num_warmups": 0,
    "max_concurrency": 1,
    "vocab_size": 2,
    "input_len": 0,
    "random_input_len": 0,
    "random_prefix_len": 0,
    "prefix_repetition_prefix_len": 0,
    "prefix_repetition_suffix_len": 0,
    "prefix_repetition_num_prefixes": 1,
    "multi_turn_first_len": 0,
    "multi_turn_turn_len": 0,
}


def check_options(args: argparse.Namespace) -> None:
    """Raise `UsageError` for a value that its flag cannot have. No request needs to be sent for that."""
    if not (args.request_rate > 0 and args.burstiness > 0 and args.num_prompts > 0):
        raise UsageError("--request-rate, --burstiness and --num-prompts must be greater than 0")
    for name, least in _LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            raise UsageError(f"--{name.replace('_', '-')} must be at least {least}")
    if args.endpoint is not None and not args.endpoint.startswith("/"):
        raise UsageError(f"--endpoint: {args.endpoint!r} is not a path such as /v1/completions")
    if not isinstance(args.extra_body, dict | None):
        raise UsageError('--extra-body is an object, such as {"top_k": 20}')


def parse_goodput(items: Sequence[str]) -> dict[str, float]:
    """Return the limits, in milliseconds by metric, that `--goodput` sets. Raises `UsageError`."""
    limits_ms = {}
    for item in items:
        name, _, limit = item.partition(":")
        try:
            limits_ms[name] = float(limit)
        except ValueError:
            limits_ms[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not limits_ms[name] >= 0:
            raise UsageError(f"--goodput: {item!r} is not like ttft:500, tpot:50 or e2el:2000 (milliseconds)")
    return limits_ms


def parse_key_value(flag: str, item: str) -> tuple[str, str]:
    """Return both sides of `KEY=VALUE`. Raises `UsageError`."""
    key, equals, value = item.partition("=")
    if not equals:
        raise UsageError(f"{flag}: {item!r} is not KEY=VALUE")
    return key.strip(), value.strip()
