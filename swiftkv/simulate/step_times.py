"""The step times of models: what running engines have measured, or a file of it."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from swiftkv._core import StepTime
from swiftkv.engine.messages import STEP_TIME_TERMS
from swiftkv.errors import ConfigError

METRIC = "swiftkv:step_time_seconds"


def read_step_times(source: str) -> dict[str, dict[str, float]]:
    """Return the seconds of each term, by model: of a running node, by its URL, or from a JSON file.

    Raises `ConfigError` if there are none.
    """
    return _of_node(source) if source.startswith(("http://", "https://")) else _of_file(Path(source))


def make_step_time(model: str, known: dict[str, dict[str, float]]) -> StepTime:
    """Return the predictor of a model's steps. Raises `ConfigError` if its terms are not known."""
    terms = known.get(model)
    if terms is None or set(terms) != set(STEP_TIME_TERMS):
        raise ConfigError(
            f"--step-time: has no step times of model '{model}' ({', '.join(STEP_TIME_TERMS)}); serve it for a while, "
            "with prompts and answers, and name the node's URL; or simulate the other models with --model"
        )
    return StepTime([terms[term] for term in STEP_TIME_TERMS])


def _of_node(url: str) -> dict[str, dict[str, float]]:
    try:
        text = httpx.get(f"{url.rstrip('/')}/metrics", timeout=10).raise_for_status().text
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ConfigError(
            f"--step-time: no node answers at {url}: {error}; name the URL of one that has served for a while, or a "
            "file that --save-step-time wrote"
        ) from None
    known: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == METRIC:
                known.setdefault(sample.labels["model_name"], {})[sample.labels["term"]] = sample.value
    return known


def _of_file(path: Path) -> dict[str, dict[str, float]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, float]])
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"--step-time: {path} has no step times: {error}; name a file that --save-step-time wrote, or a node's URL"
        ) from None
