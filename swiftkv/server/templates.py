"""Renders chat templates that clients bring, in a process that may hang or die of one."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from swiftkv.server.child import Child, ChildEndedError
from swiftkv.server.errors import ApiError
from swiftkv.server.tenants import Sender

logger = logging.getLogger(__name__)


class TemplateSource(msgspec.Struct, array_like=True, frozen=True):
    """A template and its input."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continues: bool
    variables: dict[str, Any]
    max_chars: int  # that the text may have


class Rendered(msgspec.Struct, array_like=True, frozen=True):
    """The text that a template makes, or why there is none."""

    text: str | None = None
    why: str = ""


class TemplateRenderer:
    """Renders one template at a time. Use it from one event loop."""

    def __init__(self) -> None:
        self._child = Child("swiftkv.server.template_child", "the rendering of their chat templates")
        self._decoder = msgspec.msgpack.Decoder(Rendered)

    async def render(self, source: TemplateSource, sender: Sender) -> str:
        """Return the text of a conversation.

        Raises:
            ApiError: 400 if the template is wrong, refuses the messages, does not end or makes too long a text; 429 if
                too many of the sender's templates wait.
        """
        try:
            rendered = self._decoder.decode(await self._child.ask(msgspec.msgpack.encode(source), sender))
        except ChildEndedError as ended:
            logger.warning("the process that renders chat templates of requests %s", ended)
            rendered = Rendered(
                why=f"it takes more memory or time than is allowed: the process that rendered it {ended}"
            )
        if rendered.text is None:
            raise ApiError(400, f"field 'chat_template': {rendered.why}", param="chat_template")
        return rendered.text

    async def close(self) -> None:
        """End the process."""
        await self._child.close()
