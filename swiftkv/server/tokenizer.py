"""A model's tokenizer and chat template, run in threads so that the event loop never waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import jinja2
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from swiftkv.errors import CheckpointError
from swiftkv.server.errors import ApiError

T = TypeVar("T")

# Rust's tokenizers let go of the GIL; two threads keep one long prompt from holding up the short ones.
_THREADS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")
_BYTE_OF_CHAR = {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]


class Tokenizer:
    """The tokenizer of one checkpoint.

    ``backend`` is the Rust tokenizer, for incremental decoding.
    """

    def __init__(self, hf_tokenizer: PreTrainedTokenizerFast) -> None:
        self._hf = hf_tokenizer
        self.backend: Backend = hf_tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self._byte_level = _is_byte_level(self.backend)
        self._max_chars_per_token = max(map(len, self.backend.get_vocab()))
        self.token_text = lru_cache(maxsize=65536)(self._token_text)
        self.token_bytes = lru_cache(maxsize=65536)(self._token_bytes)

    @classmethod
    def from_pretrained(cls, path: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """Read the tokenizer of a model directory in Hugging Face format.

        Raises:
            CheckpointError: there is none, or it has no fast (Rust) form.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise CheckpointError(f"{path}: no usable tokenizer: {error}") from error
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise CheckpointError(f"{path}: the tokenizer has no fast form; add a tokenizer.json to the directory")
        return cls(tokenizer)

    async def encode(self, text: str, *, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        Raises:
            ApiError: 400 if the text is so long that it cannot come to ``max_tokens`` or fewer.
        """
        self._refuse_hopeless(text, max_tokens)
        return await _in_thread(lambda: self._encode(text, add_special_tokens))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, str]], *, max_tokens: int, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of a conversation laid out by the checkpoint's chat template.

        Raises:
            ApiError: 400 if there is no template, the template refuses the messages, or they are too long.
        """
        if not self._hf.chat_template:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")

        def render_and_encode() -> list[int]:
            text = self._render(messages, add_generation_prompt)
            self._refuse_hopeless(text, max_tokens)
            return self._encode(text, add_special_tokens=False)

        return await _in_thread(render_and_encode)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ``token_ids``, special tokens included."""
        return await _in_thread(lambda: self.backend.decode(list(token_ids), skip_special_tokens=False))

    def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        return [self.backend.id_to_token(token_id) or "" for token_id in token_ids]

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        try:
            text = self._hf.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError) as error:
            raise ApiError(400, f"the chat template refuses these messages: {error}", param="messages") from error
        assert isinstance(text, str)
        return text

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _refuse_hopeless(self, text: str, max_tokens: int) -> None:
        if len(text) > max_tokens * self._max_chars_per_token:
            raise ApiError(
                400,
                f"the prompt has {len(text)} characters and cannot fit in the model's {max_tokens} tokens",
                code="context_length_exceeded",
            )

    def _token_text(self, token_id: int) -> str:
        """What one token reads as on its own: U+FFFD where it is a part of a character."""
        text: str = self.backend.decode([token_id], skip_special_tokens=False)
        return text

    def _token_bytes(self, token_id: int) -> list[int]:
        """The bytes of one token, exact for byte-level vocabularies also where they are a part of a character."""
        if self._byte_level:
            chars = self.backend.id_to_token(token_id) or ""
            if all(char in _BYTE_OF_CHAR for char in chars):
                return [_BYTE_OF_CHAR[char] for char in chars]
        return list(self._token_text(token_id).encode())


def _is_byte_level(backend: Backend) -> bool:
    decoder = backend.decoder
    return isinstance(decoder, ByteLevel) or "ByteLevel(" in repr(decoder)


async def _in_thread(work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(_THREADS, work)
