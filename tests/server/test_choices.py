from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from echo_gateway import train_tokenizer

from swiftkv.engine.messages import TokenLogprobs
from swiftkv.server.choices import Choice, Delta, StopRules, deltas
from swiftkv.server.detokenizer import REPLACEMENT, StopStrings
from swiftkv.server.generation import Generation, SequenceOutput
from swiftkv.server.named_logprobs import prompt_offsets
from swiftkv.server.reasoning_parsers import choose_reasoning
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers import TOOL_PARSERS
from swiftkv.server.tool_parsers.base import ToolFunction
from swiftkv.server.tools import ToolUse

CALL = '{"name": "now", "parameters": {}}'
CALLS = ToolUse(TOOL_PARSERS["llama3_json"], [ToolFunction("now", {})], must_call=False, is_named=False, several=True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("thinking")
    train_tokenizer(path, tags=["<think>", "</think>"])
    return Tokenizer.from_pretrained(path)


def stopped(choice: Choice, tokenizer: Tokenizer, text: str) -> Delta:
    """Return all that a choice tells of an answer that its last token ends."""
    *ids, last = tokenizer.encode(text, add_special_tokens=False)
    total = Delta(0)
    for token_id in ids:
        total.append(choice.push(SequenceOutput(0, [token_id])))
    total.append(choice.push(SequenceOutput(0, [last], finish_reason="stop")))
    return total


@pytest.mark.parametrize(
    ("skip_special_tokens", "shows_stop", "shown"),
    [(True, True, ""), (False, True, "<|im_end|>"), (False, False, ""), (True, False, "")],
)
def test_a_parser_that_reads_special_tokens_shows_the_last_one_only_if_asked(
    tokenizer: Tokenizer, skip_special_tokens: bool, shows_stop: bool, shown: str
) -> None:
    rules = StopRules(StopStrings([]), skip_special_tokens=skip_special_tokens, shows_stop=shows_stop)
    total = stopped(Choice(0, [300], tokenizer, rules, CALLS), tokenizer, f"{CALL}<|im_end|>")
    assert total.calls[0].function.name == "now"
    assert "".join(call.function.arguments for call in total.calls) == "{}"
    assert (total.text, total.finish_reason) == (shown, "tool_calls")


@pytest.mark.parametrize("shows_stop", [False, True])
@pytest.mark.parametrize("stops", [[], ["never"]])
def test_every_token_with_a_logprob_has_a_place_in_the_text(
    tokenizer: Tokenizer, stops: list[str], shows_stop: bool
) -> None:
    ids = tokenizer.encode("a€ b<|im_end|>", add_special_tokens=False)
    rules = StopRules(StopStrings(stops), skip_special_tokens=False, shows_stop=shows_stop)
    logprobs = [TokenLogprobs(-0.1, 1, [], []) for _ in ids]
    delta = Choice(0, [300], tokenizer, rules).push(SequenceOutput(0, ids, logprobs, finish_reason="stop"))
    assert delta.text == "a€ b" + ("<|im_end|>" if shows_stop else "")
    assert delta.text_offsets == [len(tokenizer.decode(ids[:end]).rstrip(REPLACEMENT)) for end in range(len(ids))]


@pytest.mark.parametrize(
    ("stops", "shown", "reason"),
    [([], "a{}", ("length", None)), (["never"], "a{}", ("length", None)), (["{}"], "a", ("stop", "{}"))],
)
def test_an_answer_that_ends_inside_a_character_has_those_before_it(
    tokenizer: Tokenizer, stops: list[str], shown: str, reason: tuple[str, str | None]
) -> None:
    """The last token has whole characters and the beginning of another."""
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.backend.get_vocab_size())}
    token, whole = next(
        (token, text.rstrip(REPLACEMENT)) for token, text in texts.items() if text.strip(REPLACEMENT) not in ("", text)
    )
    ids = [*tokenizer.encode("a", add_special_tokens=False), token]
    rules = StopRules(StopStrings([stop.format(whole) for stop in stops]))
    logprobs = [TokenLogprobs(-0.1, 1, [], []) for _ in ids]
    delta = Choice(0, [300], tokenizer, rules).push(SequenceOutput(0, ids, logprobs, finish_reason="length"))
    assert delta.text == shown.format(whole)
    assert (delta.finish_reason, delta.stop_reason) == (reason[0], reason[1] and reason[1].format(whole))
    assert delta.text_offsets == [0, 1]


@pytest.mark.parametrize("has_ended", [False, True])
def test_nothing_follows_a_stop_string_that_a_thread_finds(tokenizer: Tokenizer, has_ended: bool) -> None:
    """The engine goes on until it hears of the stop string, which the thread needs its time to find."""
    ids = tokenizer.encode("go on " * 300 + "stop", add_special_tokens=False)
    aborted: list[int] = []
    generation = Generation(range(7, 8), lambda request_ids, reason: aborted.extend(request_ids))

    async def read() -> list[Delta]:
        reader = deltas(generation, [Choice(0, [300], tokenizer, StopRules(StopStrings(["stop"])))])
        generation.output(0).token_ids += ids
        first = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)  # the reader takes the tokens, and waits for the thread
        late = generation.output(0)
        late.token_ids += ids
        if has_ended:
            late.finish_reason = "length"
            generation.end(0)
        generation.wake()
        return [*await first, *[delta async for batch in reader for delta in batch]]

    [delta] = asyncio.run(read())
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("go on " * 300, "stop", "stop")
    assert delta.token_ids == ids
    assert aborted == ([] if has_ended else [7])


@pytest.mark.parametrize(("text", "added"), [("a<|im_end|>€b", [2, 0]), ("<|im_end|>a", [0]), ("b", [])])
def test_special_tokens_that_a_prompt_was_given_take_no_room_in_its_text(
    tokenizer: Tokenizer, text: str, added: list[int]
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    bare = prompt_offsets(tokenizer, ids, text)
    assert bare == [len(tokenizer.decode(ids[:end]).rstrip(REPLACEMENT)) for end in range(len(ids))]
    assert all(map(tokenizer.is_special, added))
    assert prompt_offsets(tokenizer, added + ids, text) == [0] * len(added) + bare


def test_a_mark_of_the_reasoning_is_no_text_even_if_it_ends_the_answer(tokenizer: Tokenizer) -> None:
    parser = choose_reasoning("qwen3", tokenizer)
    assert parser is not None
    prompt = tokenizer.encode("<think>", add_special_tokens=False)
    rules = StopRules(StopStrings([]), skip_special_tokens=False, shows_stop=True)
    choice = Choice(0, prompt, tokenizer, rules, None, parser.sections(prompt, continues=False))
    total = stopped(choice, tokenizer, "so be it</think>")
    assert (total.reasoning, total.text) == ("so be it", "")


def test_a_stop_token_within_the_reasoning_is_a_part_of_it(tokenizer: Tokenizer) -> None:
    parser = choose_reasoning("qwen3", tokenizer)
    assert parser is not None
    prompt = tokenizer.encode("<think>", add_special_tokens=False)
    rules = StopRules(StopStrings([]), skip_special_tokens=False, shows_stop=True)
    choice = Choice(0, prompt, tokenizer, rules, None, parser.sections(prompt, continues=False))
    total = stopped(choice, tokenizer, "so be it<|im_end|>")
    assert (total.reasoning, total.text) == ("so be it<|im_end|>", "")
