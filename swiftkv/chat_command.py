"""`swiftkv chat`: talks to a model of a running node, in the terminal."""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv.admin_client import DEFAULT_URL, Url, why_no_answer
from swiftkv.errors import SwiftkvError

if TYPE_CHECKING:
    import openai

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""All but tab and newline: with these, an answer could change the terminal."""
_PLACES = {"peer": "in lent memory", "host": "in host memory", "storage": "in storage"}
_SHORTEST_PART = 0.1
"""The least part of an answer's time that the pieces after the first must take.

If it is less, tokens were held back on their way, as those of a tool call are, and show nothing of the model's speed.
"""
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

Show = Callable[[str], None]


class ChatError(SwiftkvError):
    """A node that does not answer, or refuses a message."""


@dataclass
class Answer:
    """An answer as it comes."""

    text: str = ""
    usage: Any = None  # openai's; None until the end, and if the user stops the answer
    sent_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None  # when its first piece came
    ended_s: float = 0.0

    def figures(self) -> str:
        """Return a line that says where the prompt was found, and how fast the answer came."""
        if self.usage is None:
            return "stopped"
        details = self.usage.prompt_tokens_details
        by_place = getattr(details, "cached_tokens_details", None) or {}
        places = [f"{by_place[place]:,} {words}" for place, words in _PLACES.items() if by_place.get(place)]
        cached = f"{details.cached_tokens if details else 0:,} cached" + (f" ({', '.join(places)})" if places else "")
        figures = f"{self.usage.prompt_tokens:,} prompt tokens, {cached}"
        if self.first_s is None:
            return f"{figures}; no text"
        figures += f"; first token {self.first_s - self.sent_s:.2f} s"
        num_later = self.usage.completion_tokens - 1
        if num_later <= 0:
            return figures
        later_s = self.ended_s - self.first_s
        if later_s < _SHORTEST_PART * (self.ended_s - self.sent_s):
            return f"{figures}, and the others at once"
        return f"{figures}, then {num_later / later_s:.0f} a second"


@dataclass
class Conversation:
    """The messages so far, and the model that answers them."""

    client: openai.OpenAI
    model: str
    max_tokens: int | None = None  # of an answer
    messages: list[Any] = field(default_factory=list)

    def ask(self, text: str, show: Show, show_thought: Show) -> Answer:
        """Send a message, and show the pieces of its answer as they come. Ctrl-C stops it.

        If openai raises an error, the message does not become part of the conversation.
        """
        asked: Any = {"role": "user", "content": _as_unicode(text)}
        completions = self.client.chat.completions  # imports modules: before the clock of the answer starts
        answer = Answer()
        try:
            with completions.create(
                model=self.model,
                messages=[*self.messages, asked],
                max_completion_tokens=self.max_tokens,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"return_cached_tokens_details": True},
            ) as stream:
                for chunk in stream:
                    answer.usage = chunk.usage or answer.usage
                    for choice in chunk.choices:
                        _take(choice.delta, answer, show, show_thought)
        except KeyboardInterrupt:
            answer.usage = None
        answer.ended_s = time.perf_counter()
        self.messages += [asked, {"role": "assistant", "content": answer.text}]
        return answer


def _as_unicode(text: str) -> str:
    """Return a text from the command line or standard input, in which a mark replaces bytes that are not UTF-8."""
    return text.encode(errors="surrogateescape").decode(errors="replace")


def _take(delta: Any, answer: Answer, show: Show, show_thought: Show) -> None:
    thought, said = getattr(delta, "reasoning_content", None), delta.content
    if (thought or said) and answer.first_s is None:
        answer.first_s = time.perf_counter()
    if thought:
        show_thought(_CONTROL_CHARACTERS.sub("", thought))
    if said:
        answer.text += said
        show(_CONTROL_CHARACTERS.sub("", said))


@dataclass(frozen=True)
class _Node:
    """A node as its clients reach it."""

    url: str
    api_key_env: str

    def client(self) -> openai.OpenAI:
        import openai

        key = os.environ.get(self.api_key_env) or "none"
        if not key.isascii():
            raise ChatError(f"the API key in {self.api_key_env} is invalid: it has characters that are not ASCII")
        try:
            return openai.OpenAI(base_url=f"{self.url.rstrip('/')}/v1", api_key=key, max_retries=0)
        except Exception as error:  # noqa: BLE001 (of the URL or the environment: the types depend on openai's version)
            raise ChatError(why_no_answer(self.url, error)) from None

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn openai's errors into `ChatError`s that say what to do."""
        import openai

        try:
            yield
        except openai.AuthenticationError:
            why = f"the node wants an API key: export {self.api_key_env}=<key>, or see --api-key-env"
            raise ChatError(why) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise ChatError(why_no_answer(self.url, cause)) from None
        except openai.APIError as error:  # of a status, or in the middle of a stream
            body = error.body if isinstance(error.body, dict) else {}
            raise ChatError(body.get("message") or error.message) from None


def chat(
    url: Url = DEFAULT_URL,
    model: Annotated[str | None, typer.Option(help="Name of the model.", show_default="the node's first")] = None,
    system_prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A system message, sent before the conversation.")
    ] = None,
    quick: Annotated[
        str | None, typer.Option("--quick", "-q", metavar="TEXT", help="Print the answer to this message, and exit.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The most tokens of an answer.")] = None,
    api_key_env: Annotated[
        str, typer.Option(metavar="NAME", help="The environment variable that holds the API key, if the node has one.")
    ] = "OPENAI_API_KEY",
) -> None:
    """Talk to a model of a running node until Ctrl-D. Ctrl-C stops an answer."""
    node = _Node(url, api_key_env)
    try:
        with node.client() as client:
            with node.errors():
                names = _names_of_models(client, url)
            if not names:
                raise ChatError("the node has no model yet; see: swiftkv models add --help")
            if model is not None and model not in names:
                raise ChatError(f"no model {model!r}; this node has: {', '.join(names)}")
            talk = Conversation(client, model or names[0], max_tokens)
            if system_prompt is not None:
                talk.messages.append({"role": "system", "content": _as_unicode(system_prompt)})
            if quick is None:
                _converse(node, talk, names)
            else:
                with node.errors():
                    talk.ask(quick, _write, show_thought=lambda thought: None)
                _write("\n")
    except ChatError as error:
        print(f"swiftkv: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def _names_of_models(client: openai.OpenAI, url: str) -> list[str]:
    """Return the names of the node's models. Raises `ChatError` for the answer of another server."""
    try:
        return [each.id for each in client.models.list()]
    except (AttributeError, TypeError, ValueError) as error:
        raise ChatError(why_no_answer(url, error)) from None


def _converse(node: _Node, talk: Conversation, names: list[str]) -> None:
    """Answer what the user types. Figures and failures go to stderr; after a failure the user may go on."""
    others = ", ".join(name for name in names if name != talk.model)
    print(f"{talk.model} answers" + (f"; --model names another: {others}" if others else ""), file=sys.stderr)
    for text in _typed_messages():
        try:
            with node.errors():
                answer = talk.ask(text, _write, _write_dim)
        except ChatError as error:
            print(f"swiftkv: {error}", file=sys.stderr)
        else:
            _write("\n")
            print(f"[{answer.figures()}]", file=sys.stderr)


def _typed_messages() -> Iterator[str]:
    """Yield the lines of standard input that are not empty; end at Ctrl-D and Ctrl-C."""
    if sys.stdin is None:  # it was closed
        return
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # for `_as_unicode`
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  # lets `input` edit lines and remember them
    while True:
        try:
            text = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                _write("\n")
            return
        if text.strip():
            yield text


def _write(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _write_dim(piece: str) -> None:
    _write(f"{_DIM}{piece}{_PLAIN}" if sys.stdout.isatty() else piece)
