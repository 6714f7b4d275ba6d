"""The step times of models and the times of the gateway, as measured by a running node or read from a file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import httpx
import msgspec
from msgspec import Meta
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from swiftkv._core import StepTime
from swiftkv.admin_client import DEFAULT_ADMIN_KEY_ENV, admin_key, no_answer_errors, why_no_answer
from swiftkv.engine.messages import STEP_TIME_TERMS, TOKEN_POINTS
from swiftkv.errors import ConfigError

METRIC = "swiftkv:step_time_seconds"
_RATIO_METRIC = "swiftkv:step_time_token_ratio"
_GATEWAY_METRICS = {
    "swiftkv:gateway_request_seconds": "gateway_request",
    "swiftkv:gateway_first_token_seconds": "gateway_first_token",
}
"""Histograms of the gateway, and the name of the mean of each."""

_Term = Annotated[float, Meta(ge=0, le=3600)]  # seconds, or a ratio


@dataclass(frozen=True)
class GatewayTime:
    """The mean time that a gateway takes, in seconds.

    Attributes:
        request_s: From the arrival of a request until it is sent to its engine.
        token_s: From the end of a step until its tokens are written.
    """

    request_s: float = 0.0
    token_s: float = 0.0


def read_step_times(source: str) -> dict[str, dict[str, float]]:
    """Return the seconds of each term, by model, from a running node's URL or a JSON file.

    They include a ratio for each of TOKEN_POINTS, and the means that the gateway has measured, if any. Raises
    `ConfigError` if there are no step times.
    """
    return _of_node(source) if source.startswith(("http://", "https://")) else _of_file(Path(source))


def make_step_time(model: str, known: dict[str, dict[str, float]]) -> StepTime:
    """Return the predictor of a model's steps. Raises `ConfigError` if its terms are not known."""
    terms = known.get(model)
    if terms is None or not set(terms) >= set(STEP_TIME_TERMS):
        raise ConfigError(
            f"--step-time: there are no step times of model '{model}' ({', '.join(STEP_TIME_TERMS)}); serve it for a "
            "while, with prompts and answers, and name the node's URL; or simulate the other models with --model"
        )
    ratios = [terms.get(_ratio_of(tokens), 1.0) for tokens in TOKEN_POINTS]
    return StepTime([terms[term] for term in STEP_TIME_TERMS], ratios)


def make_gateway_time(model: str, known: dict[str, dict[str, float]]) -> GatewayTime:
    """Return the times of the gateway; zero for a model without measurements."""
    terms = known.get(model, {})
    request, token = _GATEWAY_METRICS.values()
    return GatewayTime(terms.get(request, 0.0), terms.get(token, 0.0))


def _ratio_of(tokens: str) -> str:
    return f"ratio_{tokens}"


def _of_node(url: str) -> dict[str, dict[str, float]]:
    try:
        key = admin_key(url, DEFAULT_ADMIN_KEY_ENV)  # for a node with protect_metrics
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        text = httpx.get(f"{url.rstrip('/')}/metrics", headers=headers, timeout=10).raise_for_status().text
        return parse_step_times(text)
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        remedy = f"export {DEFAULT_ADMIN_KEY_ENV}=... with its admin key" if code == 401 else "name the URL of a node"
        raise ConfigError(f"--step-time: {url}/metrics answers with status {code}; {remedy}") from None
    except no_answer_errors(ValueError) as error:
        remedy = "name the URL of one that has served for a while, or a file that --save-step-time wrote"
        raise ConfigError(f"--step-time: {why_no_answer(url, error, remedy)}") from None


def parse_step_times(metrics_text: str) -> dict[str, dict[str, float]]:
    """Return the seconds of each term, by model, from a node's answer at `/metrics`."""
    known: dict[str, dict[str, float]] = {}
    families = list(text_string_to_metric_families(metrics_text))
    for family in families:
        if family.name == METRIC:
            for sample in family.samples:
                known.setdefault(sample.labels["model_name"], {})[sample.labels["term"]] = sample.value
        if family.name == _RATIO_METRIC:
            for sample in family.samples:
                known.setdefault(sample.labels["model_name"], {})[_ratio_of(sample.labels["tokens"])] = sample.value
    for family in families:
        if term := _GATEWAY_METRICS.get(family.name):
            for model, usual_s in _usual(family.samples).items():
                known.get(model, {})[term] = usual_s
    return known


def _usual(samples: Iterable[Sample]) -> dict[str, float]:
    """Return a usual time for each model whose histogram is not empty: the mean, unless bursts have raised it.

    Requests that come all at once wait for the gateway, perhaps seconds. So a mean above twice the time within which a
    quarter of the requests were ready counts as twice that time.
    """
    sums: dict[str, dict[str, float]] = {}
    counts: dict[str, list[tuple[float, float]]] = {}  # by model: bounds in seconds, and how many were within
    for sample in samples:
        model, kind = sample.labels["model_name"], sample.name.rpartition("_")[2]
        if kind == "bucket":
            counts.setdefault(model, []).append((float(sample.labels["le"]), sample.value))
        else:
            sums.setdefault(model, {})[kind] = sample.value
    usual = {}
    for model, of in sums.items():
        if of["count"]:
            within_s = next((bound for bound, count in counts.get(model, []) if count >= of["count"] / 4), math.inf)
            usual[model] = min(of["sum"] / of["count"], 2 * within_s)
    return usual


def _of_file(path: Path) -> dict[str, dict[str, float]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, _Term]])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--step-time: {path} has no step times: {error}; name a file that --save-step-time wrote, or a node's URL"
        ) from None
