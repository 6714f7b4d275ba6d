"""Turns token ids into text as they come: whole characters only, and never a part of a stop string."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend

REPLACEMENT = "\ufffd"
# The earlier tokens that each decode includes: enough for the decoder to see that a token does not begin the text.
_CONTEXT_TOKENS = 4
_WINDOW_TOKENS = 12
# An unfinished UTF-8 character is at most 3 bytes, and a broken byte decodes to one replacement character.
_UNFINISHED = 3


class Detokenizer:
    """Incremental decoder of one sequence, primed with the end of its prompt.

    Text is held back while it ends inside a character. Bytes that can never become one come out as U+FFFD.

    `tokenizers.decoders.DecodeStream` will not do: while bytes are broken or special tokens are left out it shows
    nothing and takes quadratic time, and it raises an error where a run of byte tokens breaks after a character.
    """

    def __init__(self, backend: Backend, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._backend = backend
        self._skip_special_tokens = skip_special_tokens
        self._window = self._end_of(prompt_ids)
        # Positions in the window at which a character ended. Vocabularies with byte tokens decode a run of bytes as
        # one: a window that began inside a character would spoil the whole run.
        self._boundaries = [0, len(self._window)]
        self._text = self._decode(self._window)  # of the window
        self._emitted_chars = len(self._text.rstrip(REPLACEMENT))  # of the window's text
        self.num_chars = 0
        """The number of characters returned so far."""

    def push(self, token_ids: Sequence[int], offsets: list[int] | None = None) -> str:
        """Take further tokens and return the text that is now certain.

        Where each token begins in the whole text is appended to `offsets`. A token that is a part of a character begins
        where the character does.
        """
        return "".join([self._push(token_id, offsets) for token_id in token_ids])

    def flush(self) -> str:
        """Return the whole characters before the one inside which the last token ends; call it when no more come."""
        certain_chars = max(self._emitted_chars, len(self._text.rstrip(REPLACEMENT)))
        rest = self._text[self._emitted_chars : certain_chars]
        self._emitted_chars = certain_chars
        self.num_chars += len(rest)
        return rest

    def _push(self, token_id: int, offsets: list[int] | None) -> str:
        before = self._text
        self._window.append(token_id)
        self._text = text = self._decode(self._window)
        if not text.endswith(REPLACEMENT):
            self._boundaries.append(len(self._window))
        is_inside = 0 < len(self._window) - self._boundaries[-1] <= _UNFINISHED
        certain_text = text[: self._emitted_chars if is_inside else _certain_chars(text)]
        if offsets is not None:
            # Bytes that turn out to be no character are text of the tokens before this one.
            broken_chars = max(0, _common_chars(before, certain_text) - self._emitted_chars)
            offsets.append(self.num_chars + broken_chars)
        new_text = certain_text[self._emitted_chars :]
        self.num_chars += len(new_text)
        self._emitted_chars = max(self._emitted_chars, len(certain_text))
        if len(self._window) > _WINDOW_TOKENS and not is_inside:
            self._shorten_window()
        return new_text

    def _shorten_window(self) -> None:
        held_chars = max(0, len(self._text) - self._emitted_chars)
        latest = len(self._window) - _CONTEXT_TOKENS
        start = max((boundary for boundary in self._boundaries if boundary <= latest), default=0)
        if start == 0 and len(self._window) > 2 * _WINDOW_TOKENS:
            start = latest  # nothing but broken bytes
        self._window = self._window[start:]
        self._boundaries = [boundary - start for boundary in self._boundaries if boundary >= start] or [0]
        self._text = self._decode(self._window)
        self._emitted_chars = max(0, len(self._text) - held_chars)

    def _end_of(self, prompt_ids: Sequence[int]) -> list[int]:
        for num_tokens in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _UNFINISHED + 1):
            window = list(prompt_ids[-num_tokens:])
            if not self._decode(window).startswith(REPLACEMENT):
                break
        return window

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens)
        return text


def _certain_chars(text: str) -> int:
    """Return how many characters of `text` stay the same, whatever bytes follow."""
    return max(len(text.rstrip(REPLACEMENT)), len(text) - _UNFINISHED)


def _common_chars(text: str, other: str) -> int:
    """Return the number of characters in the common beginning of two texts."""
    if other.startswith(text):
        return len(text)
    return next((index for index, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(other))


class StopStrings:
    """The stop strings of a request as one automaton (Aho-Corasick), shared by all its choices.

    A state is the longest beginning of a stop string that the text ends with. Reading a character costs the same
    however many stop strings there are and however long they are.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._complete: list[int | None] = [None]  # the first of `stops` that ends here
        for index, stop in enumerate(self.stops):
            self._add(index, stop)
        self._fallback = [0] * len(self._next)  # the state of the longest proper suffix of this one
        self._link()

    def __bool__(self) -> bool:
        return bool(self.stops)

    def advance(self, state: int, char: str) -> int:
        """Return the state after a further character; 0 is the first state."""
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._next[state][char]

    def depth(self, state: int) -> int:
        """Return how many characters at the end of the text may be the beginning of a stop string."""
        return self._depth[state]

    def complete(self, state: int) -> str | None:
        """Return the first of the stop strings that the text ends with."""
        index = self._complete[state]
        return None if index is None else self.stops[index]

    def _add(self, index: int, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._depth.append(self._depth[state] + 1)
                self._next.append({})
                self._complete.append(None)
            state = self._next[state][char]
        if self._complete[state] is None:  # otherwise it is there twice
            self._complete[state] = index

    def _link(self) -> None:
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for char, following in self._next[state].items():
                self._fallback[following] = self.advance(self._fallback[state], char)
                ending = (self._complete[following], self._complete[self._fallback[following]])
                self._complete[following] = min((index for index in ending if index is not None), default=None)
                states.append(following)


class StopMatcher:
    """Finds the first stop string in text that comes in pieces, and holds back what may become one."""

    def __init__(self, stops: StopStrings, *, shows_stop: bool = False) -> None:
        """With `shows_stop` the stop string is a part of the text, so nothing is held back."""
        self._stops = stops
        self._shows_stop = shows_stop
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, new_text: str, *, watch: bool = True) -> str:
        """Take further text and return the part that can be shown; set `matched` once a stop string is complete.

        The one that is complete first counts, and of those that end together the first of the request's list, as in
        vLLM. With `watch=False` none that ends in this text counts (`min_tokens` is not reached), though it may begin
        one that ends later.
        """
        if not self._stops:
            return new_text
        text = self._held + new_text
        for end, char in enumerate(new_text, start=len(self._held) + 1):
            self._state = self._stops.advance(self._state, char)
            found = self._stops.complete(self._state) if watch else None
            if found is not None:
                self.matched, self._held = found, ""
                return text[: end if self._shows_stop else end - len(found)]
        num_shown = len(text) if self._shows_stop else len(text) - self._stops.depth(self._state)
        self._held = text[num_shown:]
        return text[:num_shown]

    def flush(self) -> str:
        """Return the text that was held back; call it when the sequence ends without a stop string."""
        held, self._held = self._held, ""
        return held
