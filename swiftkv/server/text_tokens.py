"""The tokens that an answer's text consists of, for protocols that show log-probabilities beside the text alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swiftkv.engine.messages import TokenLogprobs
from swiftkv.server.generation import SequenceOutput


@dataclass(frozen=True, slots=True)
class TextToken:
    token_id: int
    logprobs: TokenLogprobs


class TextTokens:
    """Finds the tokens of the text that users see: those of reasoning, calls and the answer's end are left out.

    Text may come later than its tokens, which wait here until then.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, TextToken]] = []  # each with where its text begins in `_decoded`
        self._decoded = ""
        self._follows_call = False

    def push(self, token: TextToken, decoded: str) -> None:
        """Take the next token, and the text that was decoded with it."""
        self._waiting.append((len(self._decoded), token))
        self._decoded += decoded

    def take(self, text: str) -> list[TextToken]:
        """Return the tokens of `text`, which users see now. Tokens before it, such as spaces, are forgotten."""
        # The end tag of a call waits, too, and may contain the same characters.
        find = self._decoded.rfind if self._follows_call else self._decoded.find
        begin = max(find(text), 0)
        end = begin + len(text)
        self._follows_call = False
        positions = [position for position, _ in self._waiting] + [len(self._decoded)]
        taken = [
            token
            for (token_begin, token), token_end in zip(self._waiting, positions[1:], strict=True)
            if token_begin < end and (token_end > begin or token_begin >= begin)
        ]
        self._waiting = [(position - end, token) for position, token in self._waiting if position >= end]
        self._decoded = self._decoded[end:]
        return taken

    def forget(self, *, in_call: bool) -> None:
        """Forget the tokens that wait: they were no text. `in_call`: they were of a call, which may have an end tag."""
        self._waiting.clear()
        self._decoded = ""
        self._follows_call = in_call


def token_by_token(output: SequenceOutput) -> Iterator[SequenceOutput]:
    """Yield the parts of `output` that have one token each, or `output` itself if it has none."""
    if not output.token_ids:
        yield output
        return
    last = len(output.token_ids) - 1
    for position, token_id in enumerate(output.token_ids):
        yield SequenceOutput(
            output.index,
            [token_id],
            output.logprobs[position : position + 1],
            output.prompt_logprobs if position == 0 else None,
            finish_reason=output.finish_reason if position == last else None,
        )
