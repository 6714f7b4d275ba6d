"""The parts of request bodies: types of their fields, and the base class of all bodies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from swiftkv.server.price import LIMITS

INT32_MAX = 2**31 - 1

# The bound makes pydantic check the characters: JSON may hold halves of surrogate pairs, which no tokenizer takes.
Text = Annotated[str, Field(max_length=INT32_MAX)]
Label = Annotated[str, Field(max_length=LIMITS.label_chars)]

# Anthropic's mark of what to cache. Clients of several providers send it to all of them.
CacheControl = Annotated[dict[str, Any] | None, Field(description="Accepted, not used")]

UNSEEN = "[This is of the type {}, which this model cannot read: it takes text.]"
"""The text that a model sees in place of a tool's result that is not text."""

TEXT_ONLY = "the models take text"
NO_SERVER_TOOLS = "the server runs no tools"
"""Reasons for which kinds of content and of tools are refused."""

FIELD_NAMES: set[str] = set()
"""The fields of all bodies, as clients write them; the locations in pydantic's errors have other words, too."""


class Unsupported:
    """Marks a field whose only accepted values are `null` and those given here, all of which ask for nothing."""

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
    """Checks how many entries a mapping has before pydantic looks at the first of them.

    Pydantic checks `max_length` after the last entry, when it has made an error of every wrong one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def __call__(self, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > self._limit:
            raise PydanticCustomError(
                "too_many_entries",
                "has {count} entries; at most {limit} are allowed",
                {"count": len(value), "limit": self._limit},
            )
        return value


class OnlyKinds:
    """Checks the `type` of an object where a protocol has more types than this server takes, so that errors say why."""

    def __init__(self, *kinds: str, because: str) -> None:
        self._kinds = kinds
        self._context = {"key": "type", "kinds": ", ".join(kinds), "because": because}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str) and value not in self._kinds:
            raise PydanticCustomError("unknown_kind", "must be {kinds}", self._context)
        return value


class ToldBy:
    """Wraps a discriminator, which cannot be hashed, so that it can annotate a type: annotations are hashed."""

    def __init__(self, discriminator: Discriminator) -> None:
        self._discriminator = discriminator

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return self._discriminator.__get_pydantic_core_schema__(source, handler)


def told_by(key: str, tags: Mapping[str, str], *, default: str = "", because: str = "") -> ToldBy:
    """Return a discriminator that finds the member of a union by the text in `key`.

    Args:
        tags: The `Tag` of the member for each text. No tag may be the name of a field: errors would name that field.
        default: The text if `key` is missing.
        because: The reason why other texts are refused, if `tags` does not show it.
    """

    def tag(value: Any) -> str | None:
        if isinstance(value, Body):  # a value that is to be serialized
            return tags.get(getattr(value, key) or default)
        text = (value.get(key) or default) if isinstance(value, dict) else None
        return tags.get(text) if isinstance(text, str) else None

    return ToldBy(
        Discriminator(
            tag,
            custom_error_type="unknown_kind",
            custom_error_message="must be an object whose '{key}' is {kinds}",
            custom_error_context={"key": key, "kinds": ", ".join(tags), "because": because},
        )
    )


_check_number_of_fields = AtMost(LIMITS.fields)


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    lenient_with: ClassVar[str | None] = None
    """A header: requests that have it may have unknown fields, which are ignored. Otherwise they are refused."""

    required_fields: ClassVar[frozenset[str]] = frozenset()
    """The names of the fields that have no default, as clients write them; none of them may be `null`."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        names = {field.alias or name: field for name, field in cls.model_fields.items()}
        FIELD_NAMES.update(names)
        cls.required_fields = frozenset(name for name, field in names.items() if field.is_required())

    @model_validator(mode="before")
    @classmethod
    def _at_most_so_many_fields(cls, value: Any) -> Any:
        value = _check_number_of_fields(value)
        if not isinstance(value, dict) or None not in value.values():
            return value
        # Optional fields take `None` themselves. A required field that is `None` is left out, so that the error calls
        # it missing.
        return {name: held for name, held in value.items() if held is not None or name not in cls.required_fields}
