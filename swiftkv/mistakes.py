"""Turns pydantic's errors about a file into lines that name the key and say what would be right."""

from __future__ import annotations

import difflib
import re
import reprlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from swiftkv.units import LARGEST_SIZE, format_size

_KEY_OF_FLAG = {
    "api_key": "node.api_key_env",
    "block_size": "models[].kv_cache.block_size",
    "disable_log_requests": "node.request_log",
    "enable_log_requests": "node.request_log",
    "gpu_memory_utilization": "models[].kv_cache.memory",
    "kv_cache_memory_bytes": "models[].kv_cache.memory",
    "kv_offloading_size": "models[].tiers.host",
    "kv_transfer_config": "models[].tiers.storage",
    "model": "models[].path",
    "num_gpu_blocks_override": "models[].kv_cache.memory",
    "num_speculative_tokens": "models[].speculative_config.num_speculative_tokens",
    "otlp_traces_endpoint": "node.otlp.endpoint",
    "runner": "models[].task",
    "shutdown_timeout": "node.shutdown_timeout",
    "swap_space": "models[].tiers.host",
    "tool_call_parser": "models[].tool_parser",
    "uvicorn_log_level": "node.log_level",
}
"""The keys that do what vLLM's flags do, where the names differ."""
_UNUSABLE = re.compile(r"[\0\ud800-\udfff]")
"""NUL, and lone surrogates: JSON writes some characters as two of them, which YAML does not join."""


def describe_mistakes(error: ValidationError, root: type[BaseModel]) -> str:
    """Return one line for each mistake. `root` is the type of the whole file; its fields' descriptions are quoted."""
    return "\n".join(_describe(mistake, root) for mistake in error.errors())


def mistakes_about_text(raw: object) -> Iterator[str]:
    """Yield a line for each text in mappings and lists with characters that no file's name and no message can have."""
    seen = set()  # with YAML's anchors, a list may have itself, or another one many times
    left: deque[tuple[tuple[int | str, ...], object]] = deque([((), raw)])
    while left:
        location, value = left.popleft()
        if isinstance(value, str):
            if _UNUSABLE.search(value):
                yield f"{_key_path(location)}: {ascii(value)[:80]} has a NUL or a lone surrogate; write other text"
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in items:
                if _UNUSABLE.search(str(key)):
                    yield f"{_key_path(location)}: the key {ascii(key)[:80]} has a NUL or a lone surrogate"
                else:
                    left.append(((*location, key), inner))


def _describe(mistake: Any, root: type[BaseModel]) -> str:
    location = mistake["loc"]
    if mistake["type"] == "value_error" and not location:
        return str(mistake["ctx"]["error"])
    key = _key_path(location)
    if mistake["type"] == "extra_forbidden":
        known = list(_section_at(location[:-1], root).model_fields)
        return f"{key}: unknown key; {_instead_of(str(location[-1]), known)}"
    if mistake["type"] == "missing":
        return f"{key}: missing; write {_description_at(location, root)}"
    description = _description_at(location, root)
    if mistake["type"] == "less_than_equal" and (most := _most(mistake["ctx"]["le"])) not in description:
        return f"{key}: {show(mistake['input'])} is more than {most}, the most that can be written here"
    return f"{key}: {show(mistake['input'])} is not {description}"


def _most(limit: int) -> str:
    return format_size(limit) if limit == LARGEST_SIZE else f"{limit:.15g}"


def _instead_of(unknown: str, known: Sequence[str]) -> str:
    flag = unknown.replace("-", "_")
    if flag in known:
        return f"did you mean {flag}?"
    is_begun = any(key.startswith(flag) for key in known)  # `models` at the top, or a tenant's `api_key_env`
    if flag in _KEY_OF_FLAG and not is_begun:
        return f"vLLM's {unknown} is {_KEY_OF_FLAG[flag]} here"
    close = difflib.get_close_matches(unknown, known, n=1)
    return f"did you mean {close[0]}?" if close else f"the keys here are {', '.join(known)}"


def _key_path(location: Sequence[int | str]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".")


def _section_at(location: Sequence[int | str], root: type[BaseModel]) -> type[BaseModel]:
    section = root
    for part in location:
        if isinstance(part, str):
            inner = _section_of(section.model_fields[part].annotation)
            assert inner is not None
            section = inner
    return section


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for arg in get_args(annotation) if (section := _section_of(arg))), None)


def _description_at(location: Sequence[int | str], root: type[BaseModel]) -> str:
    if isinstance(location[-1], int):
        field = _section_at(location[:-2], root).model_fields[str(location[-2])]
        if _section_of(field.annotation) is None:
            return f"an item of {field.description}"
        return "a mapping with the keys of a " + str(location[-2]).removesuffix("s")
    field = _section_at(location[:-1], root).model_fields[location[-1]]
    section = _section_of(field.annotation)
    description = field.description or "right"
    if description.endswith("a mapping") and section is not None:
        return f"{description} with the keys {', '.join(section.model_fields)}"
    return description


def show(value: object) -> str:
    """Return a value as a user would recognise it, cut to a line."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 60
    return "null" if value is None else short.repr(value)
