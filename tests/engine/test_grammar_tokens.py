"""Tokenizers with tokens that llguidance cannot take, which no grammar allows then."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftkv.engine.grammar_tokens import open_tokenizer
from swiftkv.grammars import GrammarSource, library_form, new_matcher
from tests.engine.engine_process import EngineProcess
from tests.support.checkpoints import SHAPE, make_checkpoint, make_tokenizer

LONG = "a" * 4096
LONGEST = "a" * 1023
EOS, A, B = 0, 1, 2


def merged() -> Tokenizer:
    """Return a tokenizer that makes runs of a's by merges, `LONG` the last."""
    runs = ["a" * 2**i for i in range(13)]
    vocab = {"</s>": EOS, "a": A, "b": B} | {run: 2 + i for i, run in enumerate(runs) if i}
    tokenizer = Tokenizer(models.BPE(vocab, [(run, run) for run in runs[:-1]]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def listed() -> Tokenizer:
    """Return a tokenizer whose vocabulary is a list of tokens and scores, as SentencePiece has them."""
    pieces = [("</s>", 0.0), ("a", -1.0), ("b", -1.0), (LONG, -2.0), (LONGEST, -2.0), ("bb", -1.5)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=EOS, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def added(*, special: bool) -> Callable[[], Tokenizer]:
    def make() -> Tokenizer:
        tokenizer = Tokenizer(models.BPE({"</s>": EOS, "a": A, "b": B, "bb": 3}, [("b", "b")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_tokens([AddedToken(LONG, special=special), LONGEST])
        return tokenizer

    return make


def allowed(directory: Path, vocab_size: int, regex: str) -> set[int]:
    """Return the tokens that may begin a text that `regex` allows."""
    tokenizer = open_tokenizer(directory, vocab_size, [EOS])
    assert tokenizer is not None
    matcher = new_matcher(tokenizer, library_form(GrammarSource("regex", regex)))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


@pytest.mark.parametrize(
    "make", [merged, listed, added(special=False), added(special=True)], ids=["merged", "listed", "added", "special"]
)
def test_a_grammar_allows_every_token_but_one_that_is_too_long(
    tmp_path: Path, make: Callable[[], Tokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    assert LONG in vocab
    text = {token: token_id for token, token_id in vocab.items() if token != "</s>" and len(token) <= len(LONGEST)}
    assert allowed(tmp_path, len(vocab), "(a|b){1,5000}") == set(text.values())
    assert allowed(tmp_path, len(vocab), "a{1,5000}") == {text[token] for token in text if set(token) == {"a"}}
    assert "answers that follow a grammar never have its" in caplog.text


def test_merges_may_be_written_as_texts(tmp_path: Path) -> None:
    """Older files have them so."""
    content = json.loads(merged().to_str())
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    vocab = content["model"]["vocab"]
    assert allowed(tmp_path, len(vocab), "a{1,5000}") == {
        vocab[token] for token in vocab if set(token) == {"a"} and len(token) <= len(LONGEST)
    }


@pytest.mark.parametrize("make", [merged, listed, added(special=False), added(special=True)])
def test_a_grammar_allows_no_token_that_the_model_lacks(tmp_path: Path, make: Callable[[], Tokenizer]) -> None:
    """The tokenizer of Gemma 3's models of text alone has one token more than they have, which stands for an image."""
    tokenizer = make()
    tokenizer.add_special_tokens(["<image_soft_token>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    vocab = {token: i for token, i in tokenizer.get_vocab(with_added_tokens=True).items() if len(token) <= 1023}
    for vocab_size in (max(vocab.values()), 3):
        text = {token_id for token, token_id in vocab.items() if {*token} <= {"a", "b"} and token_id < vocab_size}
        assert allowed(tmp_path, vocab_size, "(a|b){1,5000}") == text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": 1}}}'])
def test_a_file_that_is_no_tokenizer_makes_no_grammars(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    assert open_tokenizer(tmp_path, 3, [EOS]) is None
    assert "no answer of this model can follow a grammar" in caplog.text


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedTokenizerFast, Path]:
    """Return a tokenizer with special tokens and tags between them, and its directory."""
    directory = tmp_path_factory.mktemp("tagged")
    tokenizer = make_tokenizer(320)
    tokenizer.add_tokens(["<|turn|>"], special_tokens=True)
    tokenizer.add_tokens(["<tool_call>", "<größe>", "\n\n\n"])
    tokenizer.add_tokens(["<|last|>"], special_tokens=True)
    tokenizer.save_pretrained(directory)
    return tokenizer, directory


def written(directory: Path, source: GrammarSource, wish: int, eos: int) -> list[int]:
    """Return what a model writes under a grammar that takes `wish` wherever it may, or else the first token."""
    tokenizer = open_tokenizer(directory, 400, [eos])
    assert tokenizer is not None
    matcher = new_matcher(tokenizer, library_form(source))
    token_ids: list[int] = []
    while not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        token_ids.append(wish if bits[wish] else int(np.flatnonzero(bits)[0]))
        assert matcher.consume_token(token_ids[-1]), matcher.get_error()
    assert matcher.is_accepting(), matcher.get_error()
    return token_ids


@pytest.mark.parametrize("text", ["a<|turn|>b", "<|last|>", "<tool_call>", "x<größe>y", "<|end|>", "a\n\n\nb"])
def test_a_fixed_text_is_spelled_whatever_token_has_that_text(
    tagged: tuple[PreTrainedTokenizerFast, Path], text: str
) -> None:
    tokenizer, directory = tagged
    eos = int(tokenizer.eos_token_id)
    for source in (
        GrammarSource("choice", json.dumps([text])),
        GrammarSource("json", json.dumps({"const": text})),
        GrammarSource("regex", re.escape(text)),
    ):
        token_ids = written(directory, source, wish=eos, eos=eos)
        assert not {*token_ids[:-1]} & {*tokenizer.all_special_ids}
        answer = tokenizer.decode([i for i in token_ids if i != eos], skip_special_tokens=True)
        assert answer == (json.dumps(text, ensure_ascii=False) if source.kind == "json" else text)


def test_a_text_may_have_the_token_of_a_tag(tagged: tuple[PreTrainedTokenizerFast, Path]) -> None:
    tokenizer, directory = tagged
    tag = int(tokenizer.convert_tokens_to_ids("<tool_call>"))
    token_ids = written(directory, GrammarSource("regex", "[a-z<_>]{11}"), wish=tag, eos=int(tokenizer.eos_token_id))
    assert token_ids[0] == tag


def test_the_tag_of_a_call_is_its_token(tagged: tuple[PreTrainedTokenizerFast, Path]) -> None:
    tokenizer, directory = tagged
    tag = int(tokenizer.convert_tokens_to_ids("<tool_call>"))
    source = GrammarSource("json", '{"enum": ["yes"]}', calls='calls: tag_0 "f"', tags=(("<tool_call>", tag),))
    eos = int(tokenizer.eos_token_id)
    assert tokenizer.decode(written(directory, source, wish=tag, eos=eos), skip_special_tokens=True) == "<tool_call>f"
    assert tokenizer.decode(written(directory, source, wish=eos, eos=eos), skip_special_tokens=True) == '"yes"'


def test_an_engine_serves_a_model_with_such_a_token(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    tokenizer = make_tokenizer(300)
    tokenizer.add_tokens([LONG])
    tokenizer.save_pretrained(tmp_path)
    long = tokenizer.convert_tokens_to_ids(LONG)
    assert long < SHAPE["vocab_size"]
    grammar = library_form(GrammarSource("regex", "a{1,5000}"))
    with EngineProcess(tmp_path, max_model_len=512) as engine:
        asked = {"max_tokens": 20, "logit_bias": {long: 100.0}}
        free, held = engine.wait(
            [engine.add([9, 40], **asked), engine.add([9, 40], grammar=grammar, ignore_eos=False, **asked)]
        )
    assert free.token_ids == [long] * 20
    assert held.token_ids
    assert set(tokenizer.decode(held.token_ids, skip_special_tokens=True)) == {"a"}
