"""The `compute` section of the YAML file: how much of the cores, or of its GPU, a model may take from the others."""

from __future__ import annotations

from typing import Annotated

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
    """The share of the cores, or of a GPU, that a model gets while others want them, and the most that it takes."""

    weight: Annotated[int, Field(ge=1, le=100)] = Field(1, description=_WEIGHT)
    max_share: Annotated[float, PlainValidator(_read_part)] = Field(1.0, description=_PART)
