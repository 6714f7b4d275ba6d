"""The metrics of models by name, with the text of each. A scrape appends `_total` to the name of a counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# vLLM's bounds, so that histograms of both add up, and finer ones below its lowest.
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_GATEWAY_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_RATIOS = (0.1, 0.2, 0.5, 0.67, 0.8, 0.9, 0.95, 1.05, 1.1, 1.25, 1.5, 2, 5, 10)
_TOKENS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))

GAUGES: Mapping[str, str] = {
    "vllm:num_requests_running": "Requests in the running batch",
    "vllm:num_requests_waiting": "Requests waiting to be scheduled",
    "vllm:kv_cache_usage_perc": "Share of the KV blocks that are in use, from 0 to 1",
    "swiftkv:engine_up": "1 while the model's engine serves",
    "swiftkv:step_time_error_ratio": (
        "Mean of |predicted - measured| / measured time over recent steps; 0 before any was predicted"
    ),
    "swiftkv:prefill_tokens_per_second": (
        "Prompt tokens a second that the engine expects to compute beside the running requests"
    ),
}
LABELLED_GAUGES: Mapping[str, tuple[str, str]] = {
    "swiftkv:kv_tier_tokens": (
        "tier", "Tokens whose KV is in use or cached, by tier; in host memory, those that are attended there",
    ),
    "swiftkv:expert_load_factor": (
        "layer", "Mean tokens per expert divided by the maximum, as last reported; 1 is even. Not counted on GPUs",
    ),
    "swiftkv:step_time_seconds": ("term", "Coefficients of the fitted step time, in seconds for one unit of each term"),
    "swiftkv:step_time_token_ratio": (
        "tokens", "Measured time of steps of about this many tokens, divided by the fitted time",
    ),
}  # fmt: skip
"""The label besides the model's, and the help text, by metric name."""

COUNTERS: Mapping[str, str] = {
    "swiftkv:engine_starts": "Times that the model's engine became ready",
    "vllm:num_preemptions": "Requests preempted and recomputed",
    "vllm:prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "vllm:prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "swiftkv:window_missed_tokens": (
        "Prompt tokens beyond a hit that were cached, but could not be used because their sliding-window KV was gone"
    ),
    "swiftkv:cuda_graph_hits": "Decode steps that ran as a CUDA graph",
    "swiftkv:cuda_graph_misses": "Decode steps on a GPU that ran without a CUDA graph",
    "vllm:prompt_tokens": "Prompt tokens of requests that have come to their first token, or have been pooled",
    "vllm:prompt_tokens_cached": "Those of vllm:prompt_tokens that were cached, in whatever tier",
    "vllm:generation_tokens": "Tokens generated",
    "vllm:spec_decode_num_drafts": "Drafts that steps checked",
    "vllm:spec_decode_num_draft_tokens": "Tokens of the drafts that steps checked",
    "vllm:spec_decode_num_accepted_tokens": "Tokens of drafts that were right",
}
LABELLED_COUNTERS: Mapping[str, tuple[str, str]] = {
    "swiftkv:engine_restarts": ("reason", "Times that the model's engine ended and was started again"),
    "swiftkv:requests_displaced": (
        "service_tier", "Requests preempted for one of a higher service tier, by the tier of the preempted request",
    ),
    "swiftkv:prefix_hit_tokens": ("tier", "Prompt tokens found in the prefix cache, by the tier that had their KV"),
    "swiftkv:requests_refused": ("limit", "Requests refused because the model was at a limit, by limit"),
    "vllm:prompt_tokens_by_source": (
        "source", "vllm:prompt_tokens by source; external_kv_transfer are those whose KV other models or tiers held",
    ),
    "vllm:request_success": ("finished_reason", "Requests finished"),
}  # fmt: skip
"""The label besides the model's, and the help text, by metric name."""

HISTOGRAMS: Mapping[str, tuple[str, Sequence[float]]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token", FIRST_TOKEN_S),
    "swiftkv:time_to_first_token_forecast_ratio": (
        "Time to the first token as forecast on arrival, divided by the actual time", _RATIOS,
    ),
    "swiftkv:gateway_request_seconds": (
        "From the end of a request's body until the request was sent to its engine", _GATEWAY_S,
    ),
    "swiftkv:gateway_first_token_seconds": (
        "From the end of the step that computed a stream's first token until the token was written", _GATEWAY_S,
    ),
    "vllm:inter_token_latency_seconds": ("Between two tokens of a request", _TOKEN_S),
    # vLLM's older name for the same, which dashboards still use.
    "vllm:time_per_output_token_seconds": ("Between two tokens of a request", _TOKEN_S),
    "vllm:request_time_per_output_token_seconds": ("Mean time per token after the first", _TOKEN_S),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last token", _REQUEST_S),
    "vllm:request_queue_time_seconds": ("From arrival to admission", _REQUEST_S),
    "vllm:request_prefill_time_seconds": ("From admission to the first token", _REQUEST_S),
    "vllm:request_inference_time_seconds": ("From admission to the last token", _REQUEST_S),
    "vllm:request_decode_time_seconds": ("From the first token to the last", _REQUEST_S),
    "vllm:request_prompt_tokens": ("Prompt length", _TOKENS),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt length without cached tokens", _TOKENS),
    "vllm:request_generation_tokens": ("Tokens generated", _TOKENS),
    "vllm:request_params_max_tokens": ("max_tokens asked for", _TOKENS),
    "vllm:request_params_n": ("n asked for", (1, 2, 5, 10, 20)),
}  # fmt: skip
"""The help text and the bounds of the buckets, by metric name."""


def label_names(metric: str, *further: str) -> tuple[str, ...]:
    """Return the labels of a model's metric: vLLM's have the number of the engine, by which its dashboards filter."""
    return ("model_name", "engine", *further) if metric.startswith("vllm:") else ("model_name", *further)


def label_values(metric: str, model: str, *further: str) -> tuple[str, ...]:
    """Return the values of `label_names`: each model has one engine, number 0."""
    return (model, "0", *further) if metric.startswith("vllm:") else (model, *further)
