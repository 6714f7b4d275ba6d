"""The types of the fields in all sections of the YAML file, and the words in which messages describe them.

A field's description finishes the sentence "'x' is not ...", so every message about the field says what would be right.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from swiftkv.units import LARGEST_COUNT, LARGEST_SIZE, parse_duration, parse_limit, parse_size

SIZE = "a size such as 256MiB or 1GiB (1.074 GB), or a number of bytes"
DURATION = "a duration such as 500ms, 60s, 2m or 1h"
LIMIT = f"{DURATION}, or off"
POSITIVE = "an integer of at least 1"
COUNT_OR_NULL = "an integer of at least 1, or null"
VARIABLE = "the name of an environment variable, or null"
PORT = "a port number from 0 to 65535 (0 takes any free one)"

Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0, le=LARGEST_SIZE)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
Limit = Annotated[float | None, BeforeValidator(parse_limit)]
Positive = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Port = Annotated[int, Field(ge=0, le=65535)]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


def read_off(value: object) -> object:
    """Return `None` for `off`, which PyYAML reads as a boolean unless it is quoted, and any other value as it is."""
    return None if value is False or value == "off" else value


class Section(BaseModel):
    """One mapping of the YAML file: frozen, and a key that is not known is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
