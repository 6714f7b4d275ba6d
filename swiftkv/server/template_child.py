"""The process that renders chat templates of requests: `python -m swiftkv.server.template_child`.

Templates run in transformers' sandbox, which does not limit their time and memory. Here, too much of either ends only
this process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jinja2
import msgspec

from swiftkv.server.child import ChildLimits, serve
from swiftkv.server.templates import Rendered, TemplateSource

_LIMITS = ChildLimits(memory_bytes=512 << 20, stack_bytes=8 << 20, cpu_s=2)
_SHOWN_CHARS = 512  # the most of an error, which may quote a message


def begin() -> Callable[[bytes], bytes]:
    """Return the function that renders a `TemplateSource`; it takes one as MessagePack and returns a `Rendered`."""
    from transformers.utils import chat_template_utils

    render_template: Any = chat_template_utils.render_jinja_template  # transformers annotates it as something else
    decoder = msgspec.msgpack.Decoder(TemplateSource)

    def render(message: bytes) -> bytes:
        source = decoder.decode(message)
        try:
            [text], _ = render_template(
                conversations=[source.messages],
                tools=source.tools,
                chat_template=source.template,
                continue_final_message=source.continues,
                add_generation_prompt=source.add_generation_prompt,
                **source.variables,
            )
            if len(text) > source.max_chars:  # the gateway could hardly hold what fits in here
                why = f"it makes {len(text)} characters; at most {source.max_chars} can fit this model's context length"
                return msgspec.msgpack.encode(Rendered(why=why))
            return msgspec.msgpack.encode(Rendered(text))
        except (
            jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError,
            AttributeError,
        ) as error:  # fmt: skip
            return msgspec.msgpack.encode(Rendered(why=_shown(error)))

    return render


def _shown(error: Exception) -> str:
    """Return an error as one line of ASCII. Jinja's own are sentences; others need the name of their type."""
    kind = "" if isinstance(error, jinja2.TemplateError) and str(error) else type(error).__name__
    return ascii(": ".join(filter(None, (kind, str(error)))))[1:-1][:_SHOWN_CHARS]


if __name__ == "__main__":
    sys.exit(serve(begin, _LIMITS))
