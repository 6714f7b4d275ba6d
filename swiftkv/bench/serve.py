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

from swiftkv.admin_client import (
    DEFAULT_ADMIN_KEY_ENV,
    SETTINGS_OF_CLIENTS,
    AdminError,
    default_url,
    no_answer_errors,
    request_admin,
    with_scheme,
)
from swiftkv.bench import datasets, report
from swiftkv.bench.client import Messages, Target, TimedAnswer, send
from swiftkv.bench.datasets import Conversation, DatasetError, Prompt, Tokens
from swiftkv.bench.options import (
    SAMPLING,
    UsageError,
    check_options,
    make_parser,
    parse_goodput,
    parse_key_value,
    parse_metrics,
    parse_percentiles,
)
from swiftkv.node_config import is_loopback

_TIMEOUT_S = 6 * 60 * 60
_LARGEST_PORT = 65535
_PER_REQUEST = ("input_lens", "output_lens", "cached_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")


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
    """Send the requests, print the table, save the JSON if told to, and return it."""
    metrics, percentiles = parse_metrics(args.percentile_metrics), parse_percentiles(args.metric_percentiles)
    goodput_ms = parse_goodput(args.goodput)
    metadata = dict(parse_key_value("--metadata", item) for item in args.metadata)
    check_options(args)
    async with _make_client() as client:
        target, place = await _find_target(client, args)
        if args.save_result or args.append_result:
            _make_directory(_result_path(args, target, "now").parent)
        conversations, tokenizer_id = load_conversations(args, place)
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
    result = _settings(args, target, tokenizer_id, date) | metadata | figures
    if not args.save_detailed:
        result = {key: value for key, value in result.items() if key not in _PER_REQUEST}
    if args.save_result or args.append_result:
        _save(result, args, target, date)
    return result


def load_conversations(args: argparse.Namespace, place: str | None) -> tuple[list[Conversation], str | None]:
    """Return the dataset that `args` names, and its tokenizer; `place` is where the server has its model."""
    name, rng, count = args.dataset_name, np.random.default_rng(args.seed), args.num_prompts
    is_chat = args.backend == "openai-chat"
    sends_text = name == "custom" and (is_chat or args.skip_chat_template)
    tokenizer_id = (
        None if args.skip_tokenizer_init or sends_text else args.tokenizer or _place_of_tokenizer(place, args.model)
    )
    tokenizer = _load_tokenizer(tokenizer_id)
    if name in ("sharegpt", "custom"):
        if args.dataset_path is None:
            raise UsageError(f"--dataset-path: --dataset-name {name} needs a file; name one")
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
    """Return the times from 0 at which `count` requests are sent; gaps follow a gamma distribution of `burstiness`.

    All gaps are scaled to sum up to `count / request_rate`, so that two seeds offer the same load. At an infinite rate
    all are sent at once.
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
) -> tuple[list[TimedAnswer], float]:
    """Return all answers, conversation by conversation, and how long they took in seconds."""
    may_begin = asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else contextlib.nullcontext()
    arrivals_s = arrival_times_s(
        len(conversations), args.request_rate, args.burstiness, np.random.default_rng(args.seed)
    )
    with _progress(sum(map(len, conversations)), hidden=args.disable_tqdm) as advance:
        begin_s = time.perf_counter()

        async def converse(conversation: Conversation, arrival_s: float) -> list[TimedAnswer]:
            await asyncio.sleep(begin_s + arrival_s - time.perf_counter())
            due_s = time.perf_counter()
            history: list[Any] = []
            answers = []
            for turn in conversation:
                asked = _with_history(history, turn.prompt, target)
                async with may_begin:
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


def _after(asked: Prompt | Messages, answer: TimedAnswer, target: Target) -> list[Any]:
    """Return the beginning of the next turn's prompt."""
    if target.is_chat:
        return [*asked, {"role": "assistant", "content": answer.text}]
    return [*asked, *answer.token_ids]


def _make_client() -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    try:
        return httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits)
    except no_answer_errors() as error:
        raise UsageError(f"no server can be asked: {error}; look at {SETTINGS_OF_CLIENTS}") from None


def _server_url(args: argparse.Namespace) -> str:
    if args.base_url is not None:
        return with_scheme(args.base_url)
    if args.host is None and args.port is None:
        return default_url()
    return f"http://{args.host or '127.0.0.1'}:{args.port or 8000}"


async def _find_target(client: httpx.AsyncClient, args: argparse.Namespace) -> tuple[Target, str | None]:
    """Return the target, and the directory or hub id of its model if the server reports it."""
    base_url = _server_url(args).rstrip("/").removesuffix("/v1")
    headers = dict(parse_key_value("--header", item) for item in args.header)
    if key := os.environ.get("OPENAI_API_KEY"):
        headers = {"Authorization": f"Bearer {key}"} | headers
    try:
        if (httpx.URL(base_url).port or 0) > _LARGEST_PORT:
            raise httpx.InvalidURL(f"there are no ports above {_LARGEST_PORT}")
        response = await client.get(f"{base_url}/v1/models", headers=headers)
        response.raise_for_status()
        served = {entry["id"]: entry.get("root") for entry in response.json()["data"]}
    except (httpx.HTTPError, httpx.InvalidURL, KeyError, TypeError, ValueError) as error:
        asks_for_key = isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403)
        remedy = "export OPENAI_API_KEY=... with a key of that server" if asks_for_key else "name a server that runs"
        raise UsageError(f"--base-url: no list of models at {base_url}/v1/models: {error}; {remedy}") from None
    model = str(args.served_model_name or args.model or next(iter(served), ""))
    if model not in served:
        raise UsageError(f"--model: {model!r} is not served at {base_url}; it has {', '.join(served) or 'none'}")
    is_chat = args.backend == "openai-chat"
    endpoint = args.endpoint or ("/v1/chat/completions" if is_chat else "/v1/completions")
    extra = {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
    if args.ignore_eos or args.dataset_name in ("random", "multi_turn"):
        extra["ignore_eos"] = True
    if args.dataset_name == "multi_turn" and not is_chat:
        extra["return_token_ids"] = True
    if args.logprobs is not None:
        extra |= {"logprobs": True, "top_logprobs": args.logprobs} if is_chat else {"logprobs": args.logprobs}
    place = served[model] if _is_place(served[model]) else _directory_on_node(base_url, model) or served[model]
    return Target(f"{base_url}{endpoint}", model, is_chat, headers, extra | (args.extra_body or {})), place


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


def _directory_on_node(base_url: str, model: str) -> str | None:
    """Return the directory of a model's files, if a node on this machine serves it and lets this user ask.

    Other machines are not asked: their directories are not here, and the admin key must not be sent to them.
    """
    url = httpx.URL(base_url)
    if not is_loopback(url.host):
        return None
    try:
        answer = request_admin("GET", str(url.join("/")), "models", DEFAULT_ADMIN_KEY_ENV)
        found = next((files["directory"] for files in answer["models"] if model in files["names"]), None)
    except (AdminError, KeyError, TypeError):
        return None
    return found if found is not None and Path(found).is_dir() else None


def _is_place(text: str | None) -> bool:
    """Return whether `text` is a directory or reads like a hub id.

    A mere name is not looked up at the hub: it may be another model there, and without a network that takes a minute.
    """
    return text is not None and ("/" in text or Path(text).is_dir())


def _place_of_tokenizer(told: str | None, model: str | None) -> str:
    """Return where the server says that its model is, or else `model` if that is a directory or hub id."""
    place = next((text for text in (told, model) if text is not None and _is_place(text)), None)
    if place is None:
        raise UsageError(
            f"--tokenizer: the server does not say where the files of {told or model!r} are; name their directory or "
            "hub id, or use --skip-tokenizer-init"
        )
    return place


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
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--result-dir: {directory} cannot be made: {error.strerror}") from None


def _result_path(args: argparse.Namespace, target: Target, date: str) -> Path:
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency is not None else ""
    model = target.model.split("/")[-1]
    name = (
        args.result_filename or f"{args.label or args.backend}-{args.request_rate}qps{concurrency}-{model}-{date}.json"
    )
    return Path(args.result_dir or ".") / name


def _save(result: dict[str, Any], args: argparse.Namespace, target: Target, date: str) -> None:
    path = _result_path(args, target, date)
    try:
        with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
    except OSError as error:
        raise UsageError(f"--save-result: {path} cannot be written: {error.strerror}") from None
    print(f"saved {path}", file=sys.stderr)


def _first_given(*values: int | None) -> Any:
    return next((value for value in values if value is not None), None)


if __name__ == "__main__":
    sys.exit(main())
