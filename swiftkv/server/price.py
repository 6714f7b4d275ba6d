"""The price of a request: how much it asks for, checked against one table of limits before anything is computed.

Every check takes plain numbers and raises `ApiError` with the field, the amount and the limit in its message, so that
clients know what to change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swiftkv.server.errors import ApiError

_SCAN_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one request may ask for. `docs/configuration.md` has the same table for users."""

    json_values: int = (1 << 20) + (1 << 16)
    json_containers: int = 1 << 16
    json_strings: int = 1 << 17  # keys included
    json_depth: int = 32
    fields: int = 96  # in one JSON object; the largest body has about half as many
    messages: int = 4096
    content_parts: int = 1 << 14  # in all messages together
    prompts: int = 256
    texts: int = 2048  # in a request for embeddings or scores
    choices: int = 128
    logprobs: int = 20
    stops: int = 16
    stop_chars: int = 1024  # in one stop string
    all_stop_chars: int = 4096
    stop_token_ids: int = 256
    logit_bias: int = 1024
    allowed_token_ids: int = 8192
    bad_words: int = 256
    bad_word_chars: int = 256
    metadata: int = 64
    grammar_bytes: int = 128 << 10  # in a schema, regular expression, list of choices or grammar
    grammar_depth: int = 32  # arrays and objects within each other in a schema
    grammar_values: int = 1 << 14  # in a schema
    grammar_choices: int = 1024
    tools: int = 512  # in a request; the same number of calls in one message
    template_chars: int = 1 << 16  # in a chat template
    template_variables: int = 64
    template_variables_bytes: int = 16 << 10  # as JSON
    label_chars: int = 1024
    token_ids: int = 1 << 20  # in a prompt
    sequence_tokens: int = 4 << 20  # prompt tokens, once for each choice: an engine is sent them that often
    prompt_logprobs: int = 1 << 19  # numbers in one answer
    answer_logprobs: int = 4 << 20  # numbers in one answer that is not streamed
    embedding_numbers: int = 4 << 20  # in one answer
    tokenize_chars: int = 1 << 20  # for /tokenize, whatever the model's length
    tokenize_chars_per_token: int = 16  # for /tokenize, per token of the model's length, if that is more
    detokenize_ids: int = 4  # for /detokenize, per token of the model's length


LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class JsonShape:
    """The contents of a JSON text, counted. `values` counts one for each comma, array, object and key."""

    values: int
    containers: int
    strings: int
    depth: int


def json_shape(body: bytes) -> JsonShape:
    """Count what a parser would have to build, without building it; texts that are not JSON get some count, too."""
    values, containers, num_quotes, level, depth = 1, 0, 0, 0, 0
    in_string, carried = 0, False
    data = np.frombuffer(body, np.uint8)
    for start in range(0, len(data), _SCAN_BYTES):
        chunk = data[start : start + _SCAN_BYTES]
        quotes = chunk == ord('"')
        escapes, carried = _escaped(chunk, carried)
        if escapes is not None:
            quotes &= ~escapes
        num_quotes += int(np.count_nonzero(quotes))
        # An odd number of quotes up to here, this one included: inside a string.
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ in_string
        in_string = int(inside[-1])
        outside = chunk[inside == 0]
        opened = (outside == ord("[")) | (outside == ord("{"))
        closed = (outside == ord("]")) | (outside == ord("}"))
        num_opened = int(np.count_nonzero(opened))
        if num_opened or closed.any():
            levels = level + np.cumsum(opened.view(np.int8) - closed.view(np.int8), dtype=np.int64)
            depth, level = max(depth, int(levels.max())), int(levels[-1])
        containers += num_opened
        values += num_opened + int(np.count_nonzero((outside == ord(",")) | (outside == ord(":"))))
    return JsonShape(values, containers, (num_quotes + 1) // 2, depth)


def _escaped(chunk: npt.NDArray[np.uint8], carried: bool) -> tuple[npt.NDArray[np.bool_] | None, bool]:
    """Return which bytes follow an odd run of backslashes (`None`: none do), and whether the byte after them does.

    `carried` says whether the run that ends before the chunk is odd.
    """
    backslashes = chunk == ord("\\")
    if not carried and not backslashes.any():
        return None, False
    before = np.concatenate(([carried], backslashes))
    positions = np.arange(1, len(before) + 1)
    runs = positions - np.maximum.accumulate(np.where(before, 0, positions))
    odd = runs % 2 == 1
    return odd[:-1], bool(odd[-1])


def check_json(body: bytes) -> None:
    """Refuse a body that a parser would turn into too many objects, before it is parsed.

    Raises:
        ApiError: 413, or 400 if it is nested too deeply.
    """
    shape = json_shape(body)
    if shape.depth > LIMITS.json_depth:
        raise ApiError(400, f"the body is nested {shape.depth} levels deep; at most {LIMITS.json_depth} are allowed")
    for amount, limit, what in (
        (shape.values, LIMITS.json_values, "JSON values"),
        (shape.containers, LIMITS.json_containers, "JSON arrays and objects"),
        (shape.strings, LIMITS.json_strings, "JSON strings and keys"),
    ):
        if amount > limit:
            message = f"the body holds {amount} {what}; at most {limit} are allowed"
            raise ApiError(413, message, code="body_too_complex")


def check_messages(num_parts: int) -> None:
    """Check a conversation: how many content parts its messages have together."""
    _check(num_parts, LIMITS.content_parts, "messages", "content parts")


def check_stops(stops: Sequence[str]) -> None:
    """Check the stop strings of one request, all together."""
    _check(sum(map(len, stops)), LIMITS.all_stop_chars, "stop", "characters in all stop strings together")


def check_grammar(field: str, text: str, *, is_json: bool) -> None:
    """Check the size of a grammar before it is compiled."""
    content = text.encode("utf-8", "replace")
    _check(len(content), LIMITS.grammar_bytes, field, "bytes of grammar")
    if is_json:
        shape = json_shape(content)
        _check(shape.depth, LIMITS.grammar_depth, field, "nested levels of arrays and objects")
        _check(shape.values, LIMITS.grammar_values, field, "JSON values in a grammar")


def check_template_variables(num_bytes: int) -> None:
    """Check how large the variables of a chat template are together."""
    _check(num_bytes, LIMITS.template_variables_bytes, "chat_template_kwargs", "bytes")


def check_tokenize(num_chars: int, max_model_len: int, field: str) -> None:
    """Check a text that is only to be tokenized, and may be longer than the model takes."""
    limit = max_tokenize_chars(max_model_len)
    _check(num_chars, limit, field, f"characters (this model takes {max_model_len} tokens)", status=413)


def max_tokenize_chars(max_model_len: int) -> int:
    """Return the most characters of a text that is only to be tokenized."""
    return max(LIMITS.tokenize_chars, LIMITS.tokenize_chars_per_token * max_model_len)


def check_detokenize(num_ids: int, max_model_len: int) -> None:
    """Check token ids that are to become a text."""
    limit = LIMITS.detokenize_ids * max_model_len
    _check(num_ids, limit, "tokens", f"token ids (this model takes {max_model_len} tokens)", status=413)


def check_text_lengths(field: str, num_tokens: Sequence[int], max_model_len: int) -> None:
    """Check the lengths of the texts that `field` has, in the order in which they were sent.

    Raises:
        ApiError: 400 that names the field and the longest text.
    """
    longest = max(num_tokens)
    if longest >= max_model_len:
        message = (
            f"field '{field}': text {num_tokens.index(longest)} has {longest} tokens; this model takes at most "
            f"{max_model_len - 1}"
        )
        raise ApiError(400, message, param=field, code="context_length_exceeded")


def check_pooled(field: str, num_tokens: Sequence[int], numbers_each: int) -> None:
    """Check texts for embeddings or scores, for each of which an engine computes `numbers_each` numbers.

    Raises:
        ApiError: 400 that names the field to make smaller.
    """
    _check(sum(num_tokens), LIMITS.sequence_tokens, field, "tokens in all texts together")
    _check(len(num_tokens) * numbers_each, LIMITS.embedding_numbers, field, "numbers (texts x dimensions)")


@dataclass(frozen=True, slots=True)
class Generating:
    """The work that a request would give an engine.

    Attributes:
        num_prompt_tokens: One number for each prompt.
        choices: Sequences for each prompt.
        max_tokens: The longest answer of one sequence.
        prompt_logprobs: Alternatives for each prompt token, `None` for no prompt logprobs.
        prompt_logprobs_shown: How often the answer repeats those of one prompt.
        prompt_logprobs_field: The field that asks for them.
        logprobs: Alternatives for each generated token, `None` for no logprobs.
        whole: Whether all of the answer is held until its end.
    """

    num_prompt_tokens: Sequence[int]
    choices: int
    max_tokens: int
    prompt_logprobs: int | None
    prompt_logprobs_shown: int
    prompt_logprobs_field: str
    logprobs: int | None
    whole: bool

    def check(self, max_sequences: int) -> None:
        """Check all of it; `max_sequences` is the most that one request may have.

        Raises:
            ApiError: 400 that names the field to make smaller.
        """
        sequences, tokens = len(self.num_prompt_tokens) * self.choices, sum(self.num_prompt_tokens)
        _check(sequences, max_sequences, "n", "sequences in one request")
        _check(tokens * self.choices, LIMITS.sequence_tokens, "n", "prompt tokens, counted once for each choice")
        if self.prompt_logprobs is not None:
            numbers = tokens * self.prompt_logprobs_shown * (self.prompt_logprobs + 1)
            what = "numbers (prompt tokens x (alternatives + 1), for each choice that shows them)"
            _check(numbers, LIMITS.prompt_logprobs, self.prompt_logprobs_field, what)
        if self.logprobs is not None and self.whole:
            numbers = sequences * self.max_tokens * (self.logprobs + 1)
            what = "numbers (sequences x max_tokens x (alternatives + 1)) in an answer that is not streamed"
            _check(numbers, LIMITS.answer_logprobs, "logprobs", what)


def _check(amount: int, limit: int, field: str, what: str, *, status: int = 400) -> None:
    if amount > limit:
        message = f"field '{field}' comes to {amount} {what}; at most {limit} are allowed"
        raise ApiError(status, message, param=field, code="limit_exceeded")
