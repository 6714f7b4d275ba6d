"""A model's tokenizer and chat template. Long texts are encoded on a thread, not on the event loop."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from swiftkv.arithmetic import ceil_div
from swiftkv.errors import CheckpointError
from swiftkv.server.errors import ApiError
from swiftkv.server.price import check_tokenize
from swiftkv.server.template_traits import TemplateTraits
from swiftkv.server.templates import TemplateSource
from swiftkv.server.templating import Templating
from swiftkv.server.truncation import Truncation

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one text needs no threads, which each model has already
_SHOWN_CHARS = 512  # the most of an error, which may quote a message
# A code point that stands for no character, so no special token contains it.
_MARK = "\ufdd0"
_PROBE = [
    {"role": "user", "content": "a b"},
    {"role": "assistant", "content": " c\n"},
    {"role": "user", "content": "d"},
]
# Names of transformers' own parameters, or of variables that each template gets.
_NOT_VARIABLES = {
    *inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters,
    "conversations",
    "messages",
}
_AS_USUAL = Templating()
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_REFUSALS = (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError)
"""The errors by which a template refuses its input."""
_BYTE_OF_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}


class Tokenizer:
    """The tokenizer of one checkpoint.

    `backend` is the Rust tokenizer, for incremental decoding.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast, *, split_special_tokens: bool = False) -> None:
        """Wrap a fast tokenizer. With `split_special_tokens`, special tokens in messages are text and make no roles.

        Raises:
            CheckpointError: the tokenizer cannot encode special tokens as text.
        """
        self._hf = hf_tokenizer
        self.backend: Backend = hf_tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self._byte_level = _is_byte_level(self.backend)
        self._byte_fallback = "ByteFallback(" in repr(self.backend.decoder)
        self._max_chars_per_token = max(map(len, self.backend.get_vocab()))
        self._special_ids = _special_token_ids(self.backend)
        self._special_tokens = re.compile("|".join(map(re.escape, _special_token_texts(self.backend))) or r"(?!)")
        self._plain_backend = _split_special(self.backend) if split_special_tokens else None
        self._traits = TemplateTraits(lambda messages: self._render(messages, _AS_USUAL))
        self._check_plain_backend()
        self.token_text = lru_cache(maxsize=65536)(self._token_text)
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)

    @classmethod
    def from_pretrained(
        cls, path: Path, *, trust_remote_code: bool = False, split_special_tokens: bool = False
    ) -> Tokenizer:
        """Read the tokenizer of a model directory in Hugging Face format.

        Raises:
            CheckpointError: there is none, it has no fast (Rust) form, or its chat template is invalid.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except Exception as error:
            if not (path / "tokenizer.json").is_file():
                raise CheckpointError(
                    f"{path}: there is no tokenizer.json, and no tokenizer can be made of other files ({error}); add "
                    "one, of a copy of the model that transformers saved"
                ) from error
            raise CheckpointError(f"{path}: no usable tokenizer: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise CheckpointError(f"{path}: the tokenizer has no fast form; add a tokenizer.json to the directory")
        tokenizer.chat_template = tokenizer.chat_template or _template_of_processor(path)
        _check_chat_template(path, tokenizer)
        return cls(tokenizer, split_special_tokens=split_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True, cut: Truncation | None = None) -> list[int]:
        """Return the token ids of `text`, cut to `cut`'s length; special tokens that are added to it stay."""
        return self._ids(self.backend, text, add_special_tokens, cut)

    def encode_content(self, text: str, cut: Truncation | None = None) -> list[int]:
        """Return the token ids of a client's text, in which special tokens are text with `split_special_tokens`."""
        backend = self.backend if self._plain_backend is None else self._plain_backend
        return self._ids(backend, text, True, cut)

    @property
    def chat_template(self) -> str:
        """The checkpoint's chat template, or all of them where it has one for tools; empty if it has none."""
        template = self._hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        given: Templating = _AS_USUAL,
    ) -> list[int]:
        """Return the token ids of a conversation laid out by the checkpoint's chat template.

        Raises:
            ApiError: 400 if there is no template, the template refuses its input, or the text that it makes is longer
                than `max_chars`.
        """
        if not self._hf.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
        messages, tools, given = self._for_template(self._traits.without_late_system(messages), tools, given)
        text = self._render(self._traits.in_shape(messages), given, tools)
        return self.encode_rendered(text, max_chars=max_chars)

    def template_source(
        self,
        chat_template: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_chars: int,
        tools: Sequence[Mapping[str, Any]] | None,
        given: Templating,
    ) -> TemplateSource:
        """Return the template and its input for another process to render; its text is for `encode_rendered`.

        Raises:
            ApiError: 400 for input that no template may get.
        """
        messages, tools, given = self._for_template(messages, tools, given)
        return TemplateSource(
            chat_template,
            [dict(message) for message in messages],
            None if tools is None else [dict(tool) for tool in tools],
            given.add_generation_prompt,
            given.continues,
            {**self._hf.special_tokens_map, **given.variables},
            max_chars,
        )

    def encode_rendered(self, text: str, *, max_chars: int) -> list[int]:
        """Return the token ids of the text that a template made of messages.

        Raises:
            ApiError: 400 if it is longer than `max_chars`.
        """
        if len(text) > max_chars:
            raise _too_long(len(text), max_chars, "messages")
        return (
            self._encode_disarmed(text)
            if self._plain_backend is not None
            else self.encode(text, add_special_tokens=False)
        )

    def max_chars(self, max_tokens: int) -> int:
        """Return the most characters that `max_tokens` tokens can stand for."""
        return max_tokens * self._max_chars_per_token

    def least_tokens(self, num_chars: int) -> int:
        """Return the fewest tokens that a text of `num_chars` can have."""
        return max(1, ceil_div(num_chars, self._max_chars_per_token))

    def refuse_hopeless(self, num_chars: int, max_tokens: int, field: str, cut: Truncation | None = None) -> None:
        """Refuse a text that must have more than `max_tokens` tokens, without tokenizing it.

        A text that is to be cut may have more, as long as tokenizing it does not take too long.

        Raises:
            ApiError: 400, or 413 for a text to be cut.
        """
        if cut is not None:
            check_tokenize(num_chars, max_tokens, field)
        elif num_chars > self.max_chars(max_tokens):
            raise _too_long(num_chars, self.max_chars(max_tokens), field)

    def token_id(self, text: str) -> int | None:
        """Return the token that is exactly `text`, `None` if there is none."""
        token_id: int | None = self.backend.token_to_id(text)
        return token_id

    def is_special(self, token_id: int) -> bool:
        """Return whether a token is one that `skip_special_tokens` leaves out of texts."""
        return token_id in self._special_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`, special tokens included."""
        return str(self.backend.decode(list(token_ids), skip_special_tokens=False))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's own spelling of each token."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def _check_plain_backend(self) -> None:
        """Check that ordinary conversations come to the same tokens in parts as in one piece."""
        if self._plain_backend is None or not self._hf.chat_template:
            return
        short = [token for token in _special_token_texts(self.backend) if len(token) < 2]
        if short:
            raise CheckpointError(
                f"split_special_tokens: {short[0]!r} is a special token of one character; write false"
            )
        text = self._render(_PROBE, _AS_USUAL)
        if self._encode_disarmed(text) != self.encode(text, add_special_tokens=False):
            raise CheckpointError(
                "split_special_tokens: this tokenizer joins text across special tokens, so content cannot be encoded "
                "apart from them; write split_special_tokens: false"
            )

    def _for_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        given: Templating,
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, Templating]:
        """Check the input of a template, and break special tokens in it if they are to be text."""
        if taken := sorted(_NOT_VARIABLES.intersection(given.variables)):
            message = f"field 'chat_template_kwargs': {taken[0]!r} is not a variable of the chat template"
            raise ApiError(400, message, param="chat_template_kwargs")
        if given.continues and messages[-1].get("tool_calls"):  # templates write them behind the place to go on at
            message = (
                "field 'continue_final_message': the last message calls tools, so no answer can go on with it; send "
                "the results of its calls, or leave the calls out"
            )
            raise ApiError(400, message, param="continue_final_message")
        if given.continues and not messages[-1]["content"]:
            message = "field 'continue_final_message': the last message has no content to go on with"
            raise ApiError(400, message, param="continue_final_message")
        if self._plain_backend is None:
            return messages, tools, given
        return (
            [{**self._disarmed(message), "role": message["role"]} for message in messages],
            None if tools is None else self._disarmed(tools),
            replace(given, variables=self._disarmed(given.variables)),
        )

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        given: Templating,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                add_generation_prompt=given.add_generation_prompt,
                continue_final_message=given.continues,
                tokenize=False,
                **given.variables,
            )
        except _REFUSALS as error:
            raise ApiError(
                400, f"the chat template refuses these messages: {str(error)[:_SHOWN_CHARS]}", param="messages"
            ) from error
        assert isinstance(text, str)
        try:
            text.encode()
        except UnicodeEncodeError:  # schemas and arguments of tools were not checked before
            message = (
                "the messages, tools or variables of the template have a lone surrogate, which is not valid Unicode"
            )
            raise ApiError(400, message, param="messages") from None
        return text

    def _disarmed(self, value: Any) -> Any:
        """Return a value of a client's, with each special token in its texts broken by a mark."""
        if isinstance(value, str):
            return self._special_tokens.sub(lambda match: f"{match[0][0]}{_MARK}{match[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self._disarmed(key): self._disarmed(item) for key, item in value.items()}
        return [self._disarmed(item) for item in value] if isinstance(value, list | tuple) else value

    def _encode_disarmed(self, text: str) -> list[int]:
        """Encode the text that a template made of disarmed messages: only its own special tokens count as such."""
        assert self._plain_backend is not None
        ids: list[int] = []
        end = 0
        for match in self._special_tokens.finditer(text):
            ids += self._ids(self._plain_backend, text[end : match.start()].replace(_MARK, ""), False)
            special_id = self.backend.token_to_id(match[0])
            assert special_id is not None
            ids.append(special_id)
            end = match.end()
        return ids + self._ids(self._plain_backend, text[end:].replace(_MARK, ""), False)

    @staticmethod
    def _ids(backend: Backend, text: str, add_special_tokens: bool, cut: Truncation | None = None) -> list[int]:
        # Unlike `encode`, `encode_batch` lets other threads run while it encodes a text, which may take seconds.
        if cut is None:
            ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return ids
        num_added = backend.num_special_tokens_to_add(False) if add_special_tokens else 0
        [encoding] = backend.encode_batch([text], add_special_tokens=False)
        encoding.truncate(max(0, cut.max_tokens - num_added), direction=cut.side)
        return cut.cut((backend.post_process(encoding) if add_special_tokens else encoding).ids)

    def _token_text(self, token_id: int) -> str:
        """Return the text of one token alone: U+FFFD where it is a part of a character."""
        text: str = self.backend.decode([token_id], skip_special_tokens=False)
        return text

    def _token_bytes(self, token_id: int) -> list[int]:
        """Return the bytes of one token, exact even where they are a part of a character."""
        name = self.backend.id_to_token(token_id) or ""
        if self._byte_level and all(char in _BYTE_OF_CHAR for char in name):
            return [_BYTE_OF_CHAR[char] for char in name]
        if self._byte_fallback and _BYTE_TOKEN.fullmatch(name):
            return [int(name[3:5], 16)]
        return list(self._token_text(token_id).encode())


class _TemplateFile(msgspec.Struct):
    chat_template: str


def _template_of_processor(path: Path) -> str | None:
    """Return the template in `chat_template.json`, `None` without one: AutoTokenizer leaves it to image models."""
    file = path / "chat_template.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=_TemplateFile).chat_template
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{file}: {error}") from None


def _check_chat_template(path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise `CheckpointError` if the chat template has a syntax error. One that refuses this message may work."""
    template = tokenizer.chat_template
    if not template:
        return
    if not all(isinstance(text, str) for text in (template.values() if isinstance(template, dict) else [template])):
        raise CheckpointError(f"{path}: the chat template is not a text; correct it")
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{path}: the chat template, line {error.lineno}: {error.message}; correct it") from None
    except _REFUSALS:
        pass


def _is_byte_level(backend: Backend) -> bool:
    decoder = backend.decoder
    return isinstance(decoder, ByteLevel) or "ByteLevel(" in repr(decoder)


def _split_special(backend: Backend) -> Backend:
    """Return a copy of `backend` for which special tokens in a text are characters like any others."""
    copy = Backend.from_str(backend.to_str())
    copy.encode_special_tokens = True
    return copy


def _special_token_ids(backend: Backend) -> frozenset[int]:
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def _special_token_texts(backend: Backend) -> list[str]:
    """Return the special tokens, the longest first: of those that begin alike, the longest must match."""
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    return sorted(special, key=len, reverse=True)


def _too_long(num_chars: int, max_chars: int, field: str) -> ApiError:
    return ApiError(
        400,
        f"field '{field}' comes to {num_chars} characters; at most {max_chars} can fit this model's context length",
        param=field,
        code="context_length_exceeded",
    )
