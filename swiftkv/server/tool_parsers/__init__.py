"""Parsers of tool calls, by the name that a model's `tool_parser` gives. A new one is a file and a line here."""

from __future__ import annotations

from swiftkv.server.tool_parsers.apriel import AprielParser
from swiftkv.server.tool_parsers.base import ToolParser
from swiftkv.server.tool_parsers.deepseek_v3 import DeepSeekV3Parser
from swiftkv.server.tool_parsers.functiongemma import FunctionGemmaParser
from swiftkv.server.tool_parsers.gpt_oss import GptOssParser
from swiftkv.server.tool_parsers.hermes import HermesParser
from swiftkv.server.tool_parsers.llama3_json import Llama3JsonParser
from swiftkv.server.tool_parsers.mistral import MistralParser
from swiftkv.server.tool_parsers.nemotron_json import NemotronJsonParser
from swiftkv.server.tool_parsers.pythonic import PythonicParser
from swiftkv.server.tool_parsers.qwen3_coder import Qwen3CoderParser
from swiftkv.server.tool_parsers.xlam import XlamParser

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "qwen3_coder": Qwen3CoderParser,  # before hermes, whose tag it has too
    "apriel": AprielParser,  # before hermes, whose tag its template names by mistake
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "pythonic": PythonicParser,
    "xlam": XlamParser,
    "nemotron_json": NemotronJsonParser,
    "deepseek_v3": DeepSeekV3Parser,
    "functiongemma": FunctionGemmaParser,
    "mistral": MistralParser,
    "gpt_oss": GptOssParser,
}


def choose_parser(name: str | None, chat_template: str) -> type[ToolParser] | None:
    """Return the parser of that name; without a name, the parser that the chat template implies, if any."""
    if name is None and "tools" in chat_template:
        name = next((name for name, parser in TOOL_PARSERS.items() if parser.template_mark in chat_template), None)
    return None if name is None else TOOL_PARSERS[name].for_template(chat_template)
