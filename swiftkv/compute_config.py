"""The `compute` section of the YAML file: how much of the cores a model may take from the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

from pydantic import Field, PlainValidator

from swiftkv.config_fields import Section
from swiftkv.units import parse_part

_WEIGHT = "an integer from 1 to 100"
_PART = "a percentage of the cores from 5% to 100%"
_SMALLEST_PART = 0.05


def _read_part(value: object) -> float:
    part = parse_part(value)
    if part < _SMALLEST_PART:
        raise ValueError(value)
    return part


class ComputeConfig(Section):
    """The share of the cores that a model has while others want them too, and the most that it takes at any time."""

    weight: Annotated[int, Field(ge=1, le=100)] = Field(1, description=_WEIGHT)
    max_share: Annotated[float, PlainValidator(_read_part)] = Field(1.0, description=_PART)


class WrittenCompute(NamedTuple):
    """One model's section, and what it depends on."""

    device: str
    compute: ComputeConfig | None
    is_written: bool


def mistakes_about_shares(models: Sequence[WrittenCompute]) -> Iterator[str]:
    """Yield a line for each model whose section cannot be kept, and for each that should say something and does not."""
    taking_turns = [i for i, model in enumerate(models) if model.compute is not None and model.device == "cpu"]
    for i, model in enumerate(models):
        if model.compute is not None and model.device != "cpu":
            yield (
                f"models[{i}].compute: a model on a GPU ({model.device}) does not compute on the cores; drop this, or "
                "write device: cpu"
            )
        elif taking_turns and model.device == "cpu" and not model.is_written:
            yield (
                f"models[{i}].compute: missing, and models[{taking_turns[0]}] takes turns on the same cores; write "
                "compute: {weight: 1} to take turns too, or compute: off"
            )
