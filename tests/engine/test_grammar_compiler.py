"""Grammars that are compiled beside the step loop."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from swiftkv.engine.grammar_compiler import GrammarCompiler
from swiftkv.engine.grammar_tokens import open_tokenizer
from swiftkv.grammars import GrammarSource, library_form
from tests.support.checkpoints import SHAPE, make_checkpoint


def test_each_can_be_had_when_it_is_told_however_many_came_at_once(tmp_path: Path) -> None:
    """More grammars than are kept may be compiled within one step."""
    make_checkpoint(tmp_path, "llama", tokenizer=True)
    tokenizer = open_tokenizer(tmp_path, int(SHAPE["vocab_size"]), [int(SHAPE["eos_token_id"])])
    assert tokenizer is not None
    compiled = threading.Semaphore(0)
    compiler = GrammarCompiler(tokenizer, compiled.release)
    wanted = [library_form(GrammarSource("choice", json.dumps([f"word {i}"]), None)) for i in range(80)]
    assert [compiler.find(grammar) for grammar in wanted] == [None] * len(wanted)
    for _ in wanted:
        assert compiled.acquire(timeout=60)
    for grammar, error in compiler.take_compiled():
        assert error is None
        assert compiler.find(grammar) is not None, grammar
        wanted.remove(grammar)
    assert wanted == []
    compiler.close()


def test_what_no_grammar_explains_is_raised_where_requests_would_wait_forever() -> None:
    compiled = threading.Semaphore(0)
    compiler = GrammarCompiler(None, compiled.release)  # type: ignore[arg-type]
    assert compiler.find(library_form(GrammarSource("choice", '["yes"]', None))) is None
    assert compiled.acquire(timeout=60)
    with pytest.raises(TypeError):
        list(compiler.take_compiled())
    compiler.close()
