"""Figures of a run under the keys of `vllm bench serve`, and the table that it prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from swiftkv.bench.client import TimedAnswer

_HEADINGS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
METRICS = tuple(_HEADINGS)
_WIDTH = 50


def summarize(
    answers: Sequence[TimedAnswer],
    duration_s: float,
    *,
    metrics: Iterable[str],
    percentiles: Sequence[float],
    goodput_ms: dict[str, float],
) -> dict[str, Any]:
    """Return the keys that `vllm bench serve` writes for the same answers, and the prompt tokens from the cache."""
    good = [answer for answer in answers if not answer.error]
    total_input = sum(answer.num_prompt_tokens for answer in good)
    total_output = sum(answer.num_output_tokens for answer in good)
    samples_s = {
        "ttft": [answer.ttft_s for answer in good],
        "tpot": [_tpot_s(answer) for answer in good if answer.num_output_tokens > 1],
        "itl": [itl for answer in good for itl in answer.itls_s],
        "e2el": [answer.latency_s for answer in good],
    }
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_cached_tokens": sum(answer.num_cached_tokens for answer in good),
        "request_throughput": len(good) / duration_s,
        "request_goodput": sum(_is_good(a, goodput_ms) for a in good) / duration_s if goodput_ms else None,
        "output_throughput": total_output / duration_s,
        "total_token_throughput": (total_input + total_output) / duration_s,
        "input_lens": [answer.num_prompt_tokens for answer in answers],
        "output_lens": [answer.num_output_tokens for answer in answers],
        "cached_lens": [answer.num_cached_tokens for answer in answers],
        "ttfts": [answer.ttft_s for answer in answers],
        "itls": [answer.itls_s for answer in answers],
        "latencies": [answer.latency_s for answer in answers],
        "start_times": [answer.start_s for answer in answers],
        "queue_times": [answer.queue_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error for answer in answers],
        "max_output_tokens_per_s": _peak_tokens_per_s(good),
        "max_concurrent_requests": _peak_concurrency(good),
    }
    for metric in metrics:
        values_ms = np.array(samples_s[metric] or [0.0]) * 1000
        result[f"mean_{metric}_ms"] = float(values_ms.mean())
        result[f"median_{metric}_ms"] = float(np.median(values_ms))
        result[f"std_{metric}_ms"] = float(values_ms.std())
        for percentile in percentiles:
            result[f"p{percentile:g}_{metric}_ms"] = float(np.percentile(values_ms, percentile))
    return result


def table(
    result: dict[str, Any],
    *,
    metrics: Iterable[str],
    percentiles: Sequence[float],
    request_rate: float,
    max_concurrency: int | None,
) -> str:
    """Return the figures of `result` as text, in the layout of the table that `vllm bench serve` prints."""
    rows: list[tuple[str, int | float]] = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
    ]
    if max_concurrency is not None:
        rows.append(("Maximum request concurrency:", max_concurrency))
    if request_rate != float("inf"):
        rows.append(("Request rate configured (RPS):", request_rate))
    rows += [
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("Total cached input tokens:", result["total_cached_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
    ]
    if result["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", result["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak output token throughput (tok/s):", result["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", result["max_concurrent_requests"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    lines = [" Serving Benchmark Result ".center(_WIDTH, "="), *(_row(*row) for row in rows)]
    for metric in metrics:
        short, long = _HEADINGS[metric]
        lines.append(long.center(_WIDTH, "-"))
        lines.append(_row(f"Mean {short} (ms):", result[f"mean_{metric}_ms"]))
        lines.append(_row(f"Median {short} (ms):", result[f"median_{metric}_ms"]))
        lines += [_row(f"P{p:g} {short} (ms):", result[f"p{p:g}_{metric}_ms"]) for p in percentiles]
    return "\n".join([*lines, "=" * _WIDTH])


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10}" if isinstance(value, int) else f"{label:<40} {value:<10.2f}"


def _tpot_s(answer: TimedAnswer) -> float:
    if answer.num_output_tokens <= 1:
        return 0.0
    return (answer.latency_s - answer.ttft_s) / (answer.num_output_tokens - 1)


def _is_good(answer: TimedAnswer, goodput_ms: dict[str, float]) -> bool:
    measured_s = {"ttft": answer.ttft_s, "tpot": _tpot_s(answer), "e2el": answer.latency_s}
    return all(measured_s[metric] * 1000 <= limit_ms for metric, limit_ms in goodput_ms.items())


def _peak_tokens_per_s(answers: Sequence[TimedAnswer]) -> float:
    """Return the most pieces of text in any one second since the first request."""
    if not answers:
        return 0.0
    begin_s = min(answer.start_s for answer in answers)
    times_s = [
        time_s - begin_s
        for answer in answers
        for time_s in accumulate(answer.itls_s, initial=answer.start_s + answer.ttft_s)
    ]
    return float(np.bincount(np.array(times_s, dtype=np.int64)).max())


def _peak_concurrency(answers: Sequence[TimedAnswer]) -> int:
    changes = [(answer.start_s, 1) for answer in answers]
    changes += [(answer.start_s + answer.latency_s, -1) for answer in answers]
    return max(accumulate(change for _, change in sorted(changes)), default=0)
