from __future__ import annotations

import itertools

import pytest
from echo_gateway import TEXT
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from swiftkv.server.detokenizer import REPLACEMENT, Detokenizer, StopMatcher, StopStrings
from swiftkv.server.tokenizer import Tokenizer

# Half a surrogate pair is no text; the sentencepiece decoder turns its own space mark into a space.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=f"{REPLACEMENT}▁"))


@pytest.fixture(scope="module")
def byte_fallback() -> Backend:
    """Llama 2's kind of vocabulary: pieces with a mark for the space, and every other byte as a token."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "e", "l", "o", "▁h", "lo"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("l", "o")]
    backend = Backend(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@pytest.fixture(params=["byte_level", "byte_fallback"])
def backend(request: pytest.FixtureRequest, tokenizer: Tokenizer, byte_fallback: Backend) -> Backend:
    return tokenizer.backend if request.param == "byte_level" else byte_fallback


@settings(max_examples=60, deadline=None)
@given(text=texts, cuts=st.lists(st.integers(1, 5), max_size=40))
def test_pieces_join_to_the_decoded_text(
    tokenizer: Tokenizer, byte_fallback: Backend, text: str, cuts: list[int]
) -> None:
    for backend in (tokenizer.backend, byte_fallback):
        ids = backend.encode(text, add_special_tokens=False).ids
        detokenizer, joined = Detokenizer(backend, []), ""
        expected = backend.decode(ids)
        while ids:
            size = cuts.pop() if cuts else 1
            joined += detokenizer.push(ids[:size])
            ids = ids[size:]
            assert expected.startswith(joined)
        assert joined == expected == text


@settings(max_examples=100, deadline=None)
@given(before=texts, after=texts)
def test_generation_continues_the_prompt(tokenizer: Tokenizer, byte_fallback: Backend, before: str, after: str) -> None:
    for backend in (tokenizer.backend, byte_fallback):
        whole, prompt = (backend.encode(text).ids for text in (before + after, before))
        if whole[: len(prompt)] != prompt:  # a merge across the border: the prompt's tokens are not a beginning
            continue
        detokenizer = Detokenizer(backend, prompt)
        assert "".join(detokenizer.push([token]) for token in whole[len(prompt) :]) == after


def test_a_sentencepiece_space_after_the_prompt_is_kept(byte_fallback: Backend) -> None:
    ids = byte_fallback.encode("hello hello").ids
    half = len(ids) // 2
    assert byte_fallback.decode(ids[half:]) == "hello"
    assert Detokenizer(byte_fallback, ids[:half]).push(ids[half:]) == " hello"


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(3, 262), max_size=200))
def test_bytes_that_are_no_text_come_out_as_replacement_characters(
    tokenizer: Tokenizer, byte_fallback: Backend, ids: list[int]
) -> None:
    for backend in (tokenizer.backend, byte_fallback):
        detokenizer = Detokenizer(backend, [])
        text = "".join(detokenizer.push([token]) for token in ids)
        text.encode()  # no half of a surrogate pair
        assert len(text) >= len(backend.decode(ids).rstrip(REPLACEMENT)) // 4


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(3, 1000), max_size=40))
def test_the_end_brings_all_but_the_character_that_is_not_whole(tokenizer: Tokenizer, ids: list[int]) -> None:
    detokenizer = Detokenizer(tokenizer.backend, [], skip_special_tokens=False)
    text = detokenizer.push(ids) + detokenizer.flush()
    expected = tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert text.rstrip(REPLACEMENT) == expected.rstrip(REPLACEMENT)
    assert expected.startswith(text)
    assert detokenizer.num_chars == len(text)
    assert detokenizer.flush() == ""


def test_a_character_comes_whole(backend: Backend) -> None:
    ids = backend.encode("👋").ids[-4:]
    detokenizer = Detokenizer(backend, [])
    *before, last = [detokenizer.push([token]) for token in ids]
    assert last == "👋"
    assert set(before) == {""}


@settings(max_examples=60, deadline=None)
@given(before=texts, text=texts, cuts=st.lists(st.integers(1, 5), max_size=40))
def test_tokens_begin_where_the_text_of_those_before_them_ends(
    tokenizer: Tokenizer, byte_fallback: Backend, before: str, text: str, cuts: list[int]
) -> None:
    """A token that is a part of a character begins where the character does."""
    for backend in (tokenizer.backend, byte_fallback):
        prompt, ids = (backend.encode(each, add_special_tokens=False).ids for each in (before, text))
        detokenizer, offsets = Detokenizer(backend, prompt), []
        decoded = [backend.decode(prompt + ids[:end]) for end in range(len(ids))]
        # The last of those tokens may end one character and begin the next.
        ends = itertools.accumulate((len(each.rstrip(REPLACEMENT)) for each in decoded), max)
        for start in range(0, len(ids), size := cuts.pop() if cuts else 1):
            detokenizer.push(ids[start : start + size], offsets)
        assert offsets == [end - len(backend.decode(prompt)) for end in ends]


def test_bytes_that_were_broken_are_text_before_the_next_token(backend: Backend) -> None:
    half, [whole] = backend.encode("€").ids[-3:-1], backend.encode("h").ids
    offsets: list[int] = []
    text = Detokenizer(backend, []).push([*half, whole, *half, *half, whole], offsets)
    name = backend.decode([*half, whole]).strip(REPLACEMENT)
    assert len(text.split(name)) == 3
    assert [offsets[2], offsets[-1]] == [text.index(name), text.rindex(name)]


def test_special_tokens_that_are_left_out_take_no_room(tokenizer: Tokenizer) -> None:
    ids = tokenizer.backend.encode("a<|im_end|>b").ids
    offsets: list[int] = []
    assert Detokenizer(tokenizer.backend, []).push(ids, offsets) == "ab"
    assert offsets == [0, 1, 1]


def test_special_tokens_are_left_out_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.backend.encode("a<|im_end|>b").ids
    assert Detokenizer(tokenizer.backend, []).push(ids) == "ab"
    assert Detokenizer(tokenizer.backend, [], skip_special_tokens=False).push(ids) == "a<|im_end|>b"


def first_complete(text: str, stops: list[str], after: int = 0) -> tuple[int, str] | None:
    """Return the end of the stop string that is complete first, behind the first `after` characters, and itself."""
    ends = ((text.find(stop, max(0, after + 1 - len(stop))) + len(stop), stop) for stop in stops)
    return min((found for found in ends if found[0] >= len(found[1])), key=lambda found: found[0], default=None)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
def test_stop_strings_against_a_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, text = StopMatcher(StopStrings(stops)), "", ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
        if found := first_complete(text, stops):
            end, stop = found
            assert (matcher.matched, shown) == (stop, text[: end - len(stop)])
            return
        assert matcher.matched is None
        # Only what may be the beginning of a stop string is held back, and all of that.
        endings = (text[start:] for start in range(len(text) + 1))
        held = next(ending for ending in endings if any(stop.startswith(ending) for stop in [*stops, ""]))
        assert shown + held == text
    assert shown + matcher.flush() == text


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
)
def test_a_stop_string_that_is_shown_ends_the_text_and_nothing_is_held_back(
    pieces: list[str], stops: list[str]
) -> None:
    matcher, shown, text = StopMatcher(StopStrings(stops), shows_stop=True), "", ""
    for piece in pieces:
        text += piece
        shown += matcher.push(piece)
        if found := first_complete(text, stops):
            end, stop = found
            assert (matcher.matched, shown) == (stop, text[:end])
            return
        assert (matcher.matched, shown) == (None, text)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=4),
    min_tokens=st.integers(0, 6),
)
def test_a_stop_string_counts_if_it_ends_after_min_tokens(pieces: list[str], stops: list[str], min_tokens: int) -> None:
    """vLLM's rule: it may begin before, and what is complete by then is text."""
    matcher, shown, text, unwatched = StopMatcher(StopStrings(stops)), "", "", len("".join(pieces[:min_tokens]))
    for number, piece in enumerate(pieces):
        text += piece
        shown += matcher.push(piece, watch=number >= min_tokens)
        if number >= min_tokens and (found := first_complete(text, stops, unwatched)):
            end, stop = found
            assert (matcher.matched, shown) == (stop, text[: end - len(stop)])
            return
        assert matcher.matched is None
    assert shown + matcher.flush() == text


def test_token_bytes_are_exact_inside_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.backend.encode(TEXT).ids
    assert bytes(byte for token in ids for byte in tokenizer.token_bytes(token)).decode() == TEXT


def test_token_bytes_of_a_vocabulary_with_byte_tokens(byte_fallback: Backend) -> None:
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_fallback))
    ids = byte_fallback.encode("hel日").ids
    assert bytes(byte for token in ids[-3:] for byte in tokenizer.token_bytes(token)).decode() == "日"
