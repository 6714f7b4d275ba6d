"""`swiftkv bench serve`: load for an OpenAI-compatible server, with the flags and figures of `vllm bench serve`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from swiftkv.bench import datasets, report
from swiftkv.bench.client import Answer, Messages, Target, send
from swiftkv.bench.datasets import Conversation, DatasetError, Prompt, Tokens

_TIMEOUT_S = 6 * 60 * 60
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_PER_REQUEST = ("input_lens", "output_lens", "cached_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")

EXAMPLES = """examples:
  swiftkv bench serve --model chat --random-input-len 512 --num-prompts 100 --request-rate 4
  swiftkv bench serve --dataset-name multi_turn --num-prompts 8 --multi-turn-num-turns 6 --max-concurrency 2
  swiftkv bench serve --backend openai-chat --model chat --dataset-name custom --dataset-path questions.jsonl
  swiftkv bench serve --base-url http://127.0.0.1:8001 --save-result --goodput ttft:500 tpot:50
"""


class UsageError(ValueError):
    """A wrong flag, or a server that does not answer: one line that says what would be right."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark that `argv` asks for; return 0 if every request was answered, 1 if not, 2 for a mistake."""
    args = make_parser().parse_args(argv)
    try:
        result = asyncio.run(run(args))
    except (UsageError, DatasetError) as error:
        print(f"swiftkv bench serve: {error}", file=sys.stderr)
        return 2
    return 1 if result["failed"] else 0


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Asks, prints the table, saves the JSON if told to, and returns it."""
    metrics, percentiles = _metrics(args.percentile_metrics), _percentiles(args.metric_percentiles)
    goodput_ms = _goodput(args.goodput)
    if not (args.request_rate > 0 and args.burstiness > 0 and args.num_prompts > 0):
        raise UsageError("--request-rate, --burstiness and --num-prompts must be greater than 0")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise UsageError("--max-concurrency must be at least 1")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits) as client:
        target, root = await _find_target(client, args)
        conversations, tokenizer_id = load_conversations(args, root)
        await _wait_until_ready(client, target, conversations[0], args.ready_check_timeout_sec)
        for _ in range(args.num_warmups):
            await send(client, target, conversations[0][0].prompt, conversations[0][0].output_len)
        answers, duration_s = await _ask_all(client, target, conversations, args)
    figures = report.summarize(answers, duration_s, metrics=metrics, percentiles=percentiles, goodput_ms=goodput_ms)
    print(
        report.table(
            figures,
            metrics=metrics,
            percentiles=percentiles,
            request_rate=args.request_rate,
            max_concurrency=args.max_concurrency,
        )
    )
    for error in sorted({answer.error for answer in answers if answer.error})[:10]:
        print(f"failed: {error}", file=sys.stderr)
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    result = _settings(args, target, tokenizer_id, date) | figures
    if not args.save_detailed:
        result = {key: value for key, value in result.items() if key not in _PER_REQUEST}
    if args.save_result or args.append_result:
        _save(result, args, target, date)
    return result


def load_conversations(args: argparse.Namespace, root: str | None) -> tuple[list[Conversation], str | None]:
    """Return the dataset that `args` names, and its tokenizer; `root` is where the server has its model."""
    tokenizer_id = None if args.skip_tokenizer_init else args.tokenizer or root or args.model
    name, rng, count = args.dataset_name, np.random.default_rng(args.seed), args.num_prompts
    is_chat = args.backend == "openai-chat"
    if name == "custom" and (is_chat or args.skip_chat_template):
        tokenizer_id = None
    tokenizer = _load_tokenizer(tokenizer_id)
    if name in ("sharegpt", "custom"):
        if args.dataset_path is None:
            raise UsageError(f"--dataset-path: --dataset-name {name} reads a file; name it")
        path = Path(args.dataset_path)
        if name == "custom":
            length = _first_given(args.output_len, args.custom_output_len)
            return datasets.custom(
                path,
                tokenizer,
                rng,
                count,
                output_len=None if length == -1 else length,
                chat_template=not args.skip_chat_template,
                shuffle=not args.disable_shuffle,
            ), tokenizer_id
        if tokenizer is None:
            raise UsageError("--skip-tokenizer-init: sharegpt needs a tokenizer to know how long its answers are")
        length = _first_given(args.output_len, args.sharegpt_output_len)
        return datasets.sharegpt(path, tokenizer, rng, count, output_len=length), tokenizer_id
    if tokenizer is None and is_chat:
        raise UsageError("--skip-tokenizer-init: a chat endpoint takes text, and random text needs a tokenizer")
    tokens = (
        Tokens(args.vocab_size) if tokenizer is None else Tokens(len(tokenizer), frozenset(tokenizer.all_special_ids))
    )
    made = _made(args, tokens, rng)
    if is_chat and tokenizer is not None:
        made = [
            tuple(dataclasses.replace(turn, prompt=tokenizer.decode(turn.prompt)) for turn in conversation)
            for conversation in made
        ]
    return made, tokenizer_id


def _made(args: argparse.Namespace, tokens: Tokens, rng: np.random.Generator) -> list[Conversation]:
    if args.dataset_name == "random":
        return datasets.random_prompts(
            tokens,
            rng,
            args.num_prompts,
            input_len=_first_given(args.input_len, args.random_input_len),
            output_len=_first_given(args.output_len, args.random_output_len),
            prefix_len=args.random_prefix_len,
            range_ratio=args.random_range_ratio,
        )
    if args.dataset_name == "prefix_repetition":
        return datasets.prefix_repetition(
            tokens,
            rng,
            args.num_prompts,
            prefix_len=args.prefix_repetition_prefix_len,
            suffix_len=args.prefix_repetition_suffix_len,
            num_prefixes=args.prefix_repetition_num_prefixes,
            output_len=_first_given(args.output_len, args.prefix_repetition_output_len),
        )
    return datasets.multi_turn(
        tokens,
        rng,
        args.num_prompts,
        num_turns=args.multi_turn_num_turns,
        first_len=_first_given(args.input_len, args.multi_turn_first_len),
        turn_len=args.multi_turn_turn_len,
        output_len=_first_given(args.output_len, args.multi_turn_output_len),
    )


def arrival_times_s(count: int, request_rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Return when each of `count` requests is sent, from 0; gaps follow a gamma distribution of that burstiness.

    The whole is scaled to take `count / request_rate`, so that two seeds offer the same load.
    """
    if math.isinf(request_rate):
        return [0.0] * count
    gaps_s = (
        np.full(count, 1.0)
        if math.isinf(burstiness)
        else rng.gamma(shape=burstiness, scale=1.0 / (request_rate * burstiness), size=count)
    )
    times_s = np.cumsum(gaps_s)
    return [float(time_s) for time_s in times_s * (count / request_rate / times_s[-1])]


async def _ask_all(
    client: httpx.AsyncClient, target: Target, conversations: Sequence[Conversation], args: argparse.Namespace
) -> tuple[list[Answer], float]:
    """All answers, conversation by conversation, and how long they took in seconds."""
    slots = asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else contextlib.nullcontext()
    arrivals_s = arrival_times_s(
        len(conversations), args.request_rate, args.burstiness, np.random.default_rng(args.seed)
    )
    with _progress(sum(map(len, conversations)), hidden=args.disable_tqdm) as advance:
        begin_s = time.perf_counter()

        async def converse(conversation: Conversation, arrival_s: float) -> list[Answer]:
            await asyncio.sleep(begin_s + arrival_s - time.perf_counter())
            due_s = time.perf_counter()
            history: list[Any] = []
            answers = []
            for turn in conversation:
                asked = _with_history(history, turn.prompt, target)
                async with slots:
                    answer = await send(client, target, asked, turn.output_len)
                answer.queue_s = answer.start_s - due_s
                answers.append(answer)
                advance()
                if answer.error:
                    break
                history = _after(asked, answer, target) if len(conversation) > 1 else []
                due_s = time.perf_counter()
            return answers

        pairs = zip(conversations, arrivals_s, strict=True)
        per_conversation = await asyncio.gather(*(converse(*pair) for pair in pairs))
        duration_s = time.perf_counter() - begin_s
    return [answer for answers in per_conversation for answer in answers], duration_s


def _with_history(history: list[Any], prompt: Prompt, target: Target) -> Prompt | Messages:
    if target.is_chat:
        assert isinstance(prompt, str)
        return [*history, {"role": "user", "content": prompt}]
    return [*history, *prompt] if history else prompt


def _after(asked: Prompt | Messages, answer: Answer, target: Target) -> list[Any]:
    """Return the beginning of the next turn's prompt."""
    if target.is_chat:
        return [*asked, {"role": "assistant", "content": answer.text}]
    return [*asked, *answer.token_ids]


async def _find_target(client: httpx.AsyncClient, args: argparse.Namespace) -> tuple[Target, str | None]:
    """The target, and the directory or hub id of its model if the server tells."""
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/").removesuffix("/v1")
    headers = dict(_key_value("--header", item) for item in args.header)
    if key := os.environ.get("OPENAI_API_KEY"):
        headers = {"Authorization": f"Bearer {key}"} | headers
    try:
        response = await client.get(f"{base_url}/v1/models", headers=headers)
        response.raise_for_status()
        served = {entry["id"]: entry.get("root") for entry in response.json()["data"]}
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError) as error:
        raise UsageError(f"--base-url: no models are to be had from {base_url}/v1/models: {error}") from None
    model = str(args.served_model_name or args.model or next(iter(served), ""))
    if model not in served:
        raise UsageError(f"--model: {model!r} is not served at {base_url}; it has {', '.join(served) or 'none'}")
    is_chat = args.backend == "openai-chat"
    endpoint = args.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions")
    extra = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    if args.ignore_eos or args.dataset_name in ("random", "multi_turn"):
        extra["ignore_eos"] = True
    if args.dataset_name == "multi_turn" and not is_chat:
        extra["return_token_ids"] = True
    if args.logprobs is not None:
        extra |= {"logprobs": True, "top_logprobs": args.logprobs} if is_chat else {"logprobs": args.logprobs}
    return Target(f"{base_url}{endpoint}", model, is_chat, headers, extra | (args.extra_body or {})), served[model]


async def _wait_until_ready(client: httpx.AsyncClient, target: Target, first: Conversation, timeout_s: float) -> None:
    give_up_s = time.perf_counter() + timeout_s
    while timeout_s > 0:
        answer = await send(client, target, first[0].prompt, first[0].output_len)
        if not answer.error:
            return
        if time.perf_counter() > give_up_s:
            raise UsageError(f"--ready-check-timeout-sec: no answer within {timeout_s:g} s: {answer.error}")
        await asyncio.sleep(1)


@contextlib.contextmanager
def _progress(total: int, *, hidden: bool) -> Iterator[Any]:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=hidden) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)


def _load_tokenizer(tokenizer_id: str | None) -> Any:
    if tokenizer_id is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokenizer_id)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(
            f"--tokenizer: cannot load {tokenizer_id!r} ({reason}); give a directory, or --skip-tokenizer-init"
        ) from None


def _settings(args: argparse.Namespace, target: Target, tokenizer_id: str | None, date: str) -> dict[str, Any]:
    return {
        "date": date,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": target.model,
        "tokenizer_id": tokenizer_id,
        "num_prompts": args.num_prompts,
        **dict(_key_value("--metadata", item) for item in args.metadata),
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }


def _save(result: dict[str, Any], args: argparse.Namespace, target: Target, date: str) -> None:
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    model = target.model.split("/")[-1]
    name = (
        args.result_filename or f"{args.label or args.backend}-{args.request_rate}qps{concurrency}-{model}-{date}.json"
    )
    path = Path(args.result_dir or ".") / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")
    print(f"saved {path}", file=sys.stderr)


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in report.METRICS:
            raise UsageError(f"--percentile-metrics: {name!r} is not one of {', '.join(report.METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 100 for value in values):
        raise UsageError(f"--metric-percentiles: {text!r} is no list such as 50,90,99")
    return values


def _goodput(items: Sequence[str]) -> dict[str, float]:
    limits_ms = {}
    for item in items:
        name, _, limit = item.partition(":")
        try:
            limits_ms[name] = float(limit)
        except ValueError:
            limits_ms[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or limits_ms[name] < 0:
            raise UsageError(f"--goodput: {item!r} is not like ttft:500, tpot:50 or e2el:2000 (milliseconds)")
    return limits_ms


def _key_value(flag: str, item: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not equals:
        raise UsageError(f"{flag}: {item!r} is not KEY=VALUE")
    return key.strip(), value.strip()


def _first_given(*values: int | None) -> Any:
    return next((value for value in values if value is not None), None)


def make_parser() -> argparse.ArgumentParser:
    """Return a parser of the flags of `vllm bench serve` that concern serving text, with its names and defaults."""
    parser = argparse.ArgumentParser(
        prog="swiftkv bench serve",
        usage="swiftkv bench serve [options]",
        description="Load for an OpenAI-compatible server, with the flags and figures of `vllm bench serve`.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("server").add_argument
    add("--backend", choices=["openai", "openai-chat", "vllm"], default="openai", help="completions, or chat")
    add("--base-url", help="instead of --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--endpoint", help="default: /v1/completions, or /v1/chat/completions for openai-chat")
    add("--model", help="default: the first one that the server lists")
    add("--served-model-name", help="what the server calls it, where --model names the tokenizer")
    add("--tokenizer", help="directory or hub id; default: where the server says its model is")
    add("--skip-tokenizer-init", action="store_true", help="random ids below --vocab-size instead")
    add("--vocab-size", type=int, default=4096, help="with --skip-tokenizer-init")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="OPENAI_API_KEY is sent where it is set")
    add("--ready-check-timeout-sec", type=float, default=0, help="wait so long for a first answer; 0: do not")

    add = parser.add_argument_group("load").add_argument
    add("--num-prompts", type=int, default=1000, help="prompts, or conversations")
    add("--request-rate", type=float, default=math.inf, help="prompts a second; inf: all at once")
    add("--burstiness", type=float, default=1.0, help="1: Poisson; less: in bursts; more: evenly")
    add("--max-concurrency", type=int, help="requests in flight at most")
    add("--num-warmups", type=int, default=0)
    add("--seed", type=int, default=0)
    add("--disable-tqdm", action="store_true", help="no progress bar")

    add = parser.add_argument_group("dataset").add_argument
    names = ["random", "prefix_repetition", "multi_turn", "sharegpt", "custom"]
    add("--dataset-name", choices=names, default="random")
    add("--dataset-path", help="ShareGPT's JSON, or JSONL with a prompt a line for custom")
    add("--input-len", type=int, help="for any dataset that has one")
    add("--output-len", type=int, help="for any dataset")
    add("--random-input-len", type=int, default=1024)
    add("--random-output-len", type=int, default=128)
    add("--random-range-ratio", type=float, default=0.0, help="lengths vary by this share, up and down")
    add("--random-prefix-len", type=int, default=0, help="tokens that all prompts share")
    add("--prefix-repetition-prefix-len", type=int, default=256)
    add("--prefix-repetition-suffix-len", type=int, default=256)
    add("--prefix-repetition-num-prefixes", type=int, default=10)
    add("--prefix-repetition-output-len", type=int, default=128)
    add("--multi-turn-num-turns", type=int, default=4)
    add("--multi-turn-first-len", type=int, default=512, help="tokens of the first turn")
    add("--multi-turn-turn-len", type=int, default=64, help="tokens of each later turn")
    add("--multi-turn-output-len", type=int, default=64)
    add("--sharegpt-output-len", type=int, help="default: as long as the recorded answer")
    add("--custom-output-len", type=int, default=256, help="-1: the line's output_tokens")
    add("--skip-chat-template", action="store_true", help="send custom prompts as they are")
    add("--disable-shuffle", action="store_true", help="custom prompts in the order of the file")

    add = parser.add_argument_group("sampling").add_argument
    for name in _SAMPLING:
        add(f"--{name.replace('_', '-')}", type=int if name == "top_k" else float)
    add("--ignore-eos", action="store_true", help="always on for random and multi_turn")
    add("--logprobs", type=int)
    add("--extra-body", type=json.loads, metavar="JSON", help="more fields for every request")

    add = parser.add_argument_group("result").add_argument
    add("--percentile-metrics", default="ttft,tpot,itl", help=f"of {','.join(report.METRICS)}")
    add("--metric-percentiles", default="99", help="such as 50,90,99")
    add("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="such as ttft:500 tpot:50 e2el:2000")
    add("--save-result", action="store_true")
    add("--save-detailed", action="store_true", help="with each request's times, text and error")
    add("--append-result", action="store_true", help="to a file that may exist")
    add("--result-dir")
    add("--result-filename")
    add("--label", help="default: the backend")
    add("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
