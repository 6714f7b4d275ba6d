"""The parts of request bodies: types of their fields, and the class that all of them are."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from swiftkv.server.price import LIMITS

INT32_MAX = 2**31 - 1

# The bound makes pydantic look into the string: JSON has halves of surrogate pairs, which no tokenizer takes.
Text = Annotated[str, Field(max_length=INT32_MAX)]
Label = Annotated[str, Field(max_length=LIMITS.label_chars)]


class Unsupported:
    """Marks a field whose only accepted values are ``null`` and those given here, all of which ask for nothing."""

    def __init__(self, *harmless: Any) -> None:
        self.harmless = (None, *harmless)

    def check(self, value: Any) -> None:
        if not any(type(value) is type(ok) and value == ok for ok in self.harmless):
            raise PydanticCustomError("unsupported_field", "is not supported")

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.harmless), "description": "Not supported"}


class AtMost:
    """Checks how many entries a mapping has before pydantic looks at the first: it checks `max_length` after the last.

    It would make an error of every wrong entry until then.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > self._limit:
            raise PydanticCustomError(
                "too_many_entries",
                "has {count} entries; at most {limit} are taken",
                {"count": len(value), "limit": self._limit},
            )
        return value


_check_number_of_fields = AtMost(LIMITS.fields)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _at_most_so_many_fields(cls, value: Any) -> Any:
        return _check_number_of_fields(value)
