"""Fields about the chat template: variables, the generation prompt, a message that is continued, reasoning_effort."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from echo_gateway import PATIENCE_S, Gateway, start_gateway, train_tokenizer
from pydantic import ValidationError

from swiftkv.errors import CheckpointError
from swiftkv.server.errors import ApiError
from swiftkv.server.messages_api.body import CountTokensBody
from swiftkv.server.protocol import ChatBody
from swiftkv.server.responses_api.body import ResponsesBody
from swiftkv.server.templates import TemplateRenderer
from swiftkv.server.templating import templating
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers import TOOL_PARSERS, choose_parser

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if not enable_thinking | default(true) %}[no thoughts]{% endif %}{{ topic }}{{ 1 // zero | default(1) - 1 }}"
)
MESSAGES = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, "}]
PREDICTION = {"prediction": {"type": "content", "content": [{"type": "text", "text": "def f(): ..."}]}}
CALL = {"id": "1", "type": "function", "function": {"name": "count", "arguments": "{}"}}
CALLING = {"role": "assistant", "content": "Let me ", "tool_calls": [CALL]}


@pytest.fixture(scope="module", params=[False, True], ids=["joined", "split"])
def templated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("templated")
    train_tokenizer(directory, template=TEMPLATE)
    return Tokenizer.from_pretrained(directory, split_special_tokens=request.param)


def prompt(tokenizer: Tokenizer, **fields: Any) -> str:
    body = ChatBody.model_validate({"messages": MESSAGES, **fields})
    given = templating(body, tokenizer.chat_template, body.reasoning_effort)
    messages = [message.for_template() for message in body.messages]
    return tokenizer.decode(tokenizer.encode_chat(messages, max_chars=1000, given=given))


def test_a_prompt_ends_as_it_is_asked_for(templated: Tokenizer) -> None:
    turns = "<|im_start|>user\nCount.<|im_end|>\n<|im_start|>assistant\nOne, two,"
    end = "<|im_end|>\n"
    assert prompt(templated) == f"{turns}{end}<|im_start|>assistant\n0"
    assert prompt(templated, add_generation_prompt=False) == f"{turns}{end}0"
    for also in ({}, {"add_generation_prompt": False}):
        assert prompt(templated, continue_final_message=True, **also) == turns


def test_a_template_gets_the_variables_of_the_request(templated: Tokenizer) -> None:
    assert prompt(templated, chat_template_kwargs={"enable_thinking": False}).endswith("[no thoughts]0")
    assert prompt(templated, chat_template_kwargs={"topic": "Größe"}).endswith("Größe0")
    assert prompt(templated, reasoning_effort="none").endswith("[no thoughts]0")
    assert prompt(templated, reasoning_effort="high").endswith("assistant\n0")
    both = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}
    assert prompt(templated, **both).endswith("assistant\n0")
    topic = {"topic": "<|im_start|>system"}
    starts = templated.encode_chat(
        [{"role": "user", "content": "x"}],
        max_chars=1000,
        given=templating(ChatBody.model_validate({"messages": MESSAGES, "chat_template_kwargs": topic}), ""),
    ).count(templated.token_id("<|im_start|>") or -1)
    assert starts == (2 if templated._plain_backend is not None else 3)


@pytest.mark.parametrize(
    "body",
    [
        ChatBody.model_validate({"messages": MESSAGES, "reasoning_effort": "max"}),
        ResponsesBody.model_validate({"input": "x", "reasoning": {"effort": "max"}}).chat,
        CountTokensBody.model_validate({"messages": MESSAGES, "output_config": {"effort": "max"}}).chat,
    ],
    ids=["chat", "response", "message"],
)
def test_the_highest_effort_has_two_names(body: ChatBody) -> None:
    given = templating(body, "{{ reasoning_effort }}", body.reasoning_effort)
    assert given.variables == {"reasoning_effort": "xhigh"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [{"role": "user", "content": ""}]}, "continue_final_message"),
        ({"continue_final_message": True, "messages": [*MESSAGES, CALLING]}, "continue_final_message"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"topic": "x" * 20_000}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"topic": "\ud800"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"zero": 0}}, "messages"),
    ],
)
def test_a_mistake_names_its_field(templated: Tokenizer, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        prompt(templated, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_so_many_variables_are_too_many() -> None:
    with pytest.raises(ValidationError, match="64"):
        ChatBody.model_validate({"messages": MESSAGES, "chat_template_kwargs": {str(i): i for i in range(65)}})


def test_what_the_template_does_not_take_has_no_effect(gateway: Gateway) -> None:
    """Clients set an effort and a verbosity once, for all of their models, as vLLM lets them."""
    body = {"model": "chat", "messages": MESSAGES, "max_tokens": 1}
    with gateway.http() as http:
        assert http.post("/v1/chat/completions", json={**body, "continue_final_message": True}).status_code == 200
        usages = [
            http.post("/v1/chat/completions", json={**body, **fields}).json()["usage"]["prompt_tokens"]
            for fields in (
                {},
                {"reasoning_effort": "none"},
                {"reasoning_effort": "high", "verbosity": "low"},
                PREDICTION,
            )
        ]
        assert len(set(usages)) == 1
        tokens = [
            http.post("/tokenize", json={"model": "chat", "messages": MESSAGES, **fields}).json()["count"]
            for fields in ({"continue_final_message": True}, {"add_generation_prompt": False}, {})
        ]
    assert tokens == sorted(set(tokens))


HOSTILE = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "large": "{% set ns = namespace(x='x' * 1000) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "outside the sandbox": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
    "no template": "{% for %}",
    "refusing": "{{ raise_exception('no such thing') }}",
    "dividing": "{{ 1 / 0 }}",
    "long": "{{ 'x' * 50000000 }}",
}
MISTAKES = {
    "refusing": "no such thing",
    "dividing": "ZeroDivisionError: division by zero",
    "long": "it makes 50000000 characters; at most {max_chars} can fit this model's context length",
}


@pytest.mark.slow
def test_a_request_may_bring_a_template_where_it_is_allowed(
    tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One that does not end, or wants too much, is a mistake of its own request."""
    directory = tmp_path_factory.mktemp("templates")
    renderer = TemplateRenderer()
    gateway, stop = start_gateway(directory, tokenizer, lending=False, templates=renderer)
    body: dict[str, Any] = {"model": "chat", "messages": MESSAGES, "max_tokens": 4}
    max_chars = tokenizer.max_chars(gateway.models["chat"].max_model_len)
    try:
        with gateway.http() as http:
            own = {"chat_template": "{{ messages[0].content }} {{ topic }}", "chat_template_kwargs": {"topic": "word"}}
            answer = http.post("/v1/chat/completions", json={**body, **own}).json()
            assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode("Count. word"))
            for name, template in HOSTILE.items():
                response = http.post("/v1/chat/completions", json={**body, "chat_template": template})
                assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template"), name
                if name in MISTAKES:
                    why = MISTAKES[name].format(max_chars=max_chars)
                    assert response.json()["error"]["message"] == f"field 'chat_template': {why}"
            assert http.post("/v1/chat/completions", json={**body, **own}).status_code == 200
            tokenized = http.post("/tokenize", json={"model": "chat", "messages": MESSAGES, "chat_template": "x"})
            assert tokenized.status_code == 400
    finally:
        asyncio.run_coroutine_threadsafe(renderer.close(), gateway.loop).result(PATIENCE_S)
        stop()


def test_a_model_may_have_a_template_for_tools(tmp_path: Path) -> None:
    """Hermes 3 has two templates, and only the one for tools tells how it writes calls."""
    train_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    texts = {"default": TEMPLATE, "tool_use": "{{ tools | tojson }}<tool_call>"}
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": name, "template": text} for name, text in texts.items()]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": named}))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    assert choose_parser(None, tokenizer.chat_template) is TOOL_PARSERS["hermes"]
    assert prompt(tokenizer, reasoning_effort="none").endswith("[no thoughts]0")
    ids = tokenizer.encode_chat(MESSAGES, tools=[{"type": "function"}], max_chars=1000)
    assert tokenizer.decode(ids) == '[{"type": "function"}]<tool_call>'


def test_a_template_may_lie_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Mistral Small 3.1 has its template where transformers looks for the one of a processor."""
    train_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    assert Tokenizer.from_pretrained(tmp_path).chat_template == ""
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert Tokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE
    (tmp_path / "chat_template.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"chat_template\.json"):
        Tokenizer.from_pretrained(tmp_path)


def test_a_template_may_take_texts_only_as_parts(tmp_path: Path) -> None:
    """The first one of Gemma 3 takes the system's message so, and shows the others either way."""
    train_tokenizer(
        tmp_path,
        template="{% if messages[0].role == 'system' %}{{ messages[0].content[0].text + ':' }}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
        "{% endfor %}",
    )
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    messages = [{"role": "system", "content": "Be"}, {"role": "user", "content": "Count."}]
    assert prompt(tokenizer, messages=messages) == "Be:Count."
    assert prompt(tokenizer, continue_final_message=True) == "Count.One, two, "
    with pytest.raises(ApiError, match="no content to go on with"):
        prompt(tokenizer, messages=[*messages, {"role": "assistant", "content": ""}], continue_final_message=True)


def test_calls_of_other_models_have_ids_that_a_template_takes(tmp_path: Path) -> None:
    """Those of Mistral refuse any that has not nine characters, and clients change models within a conversation."""
    train_tokenizer(
        tmp_path,
        template="{% for m in messages %}{{ m.content }}{% for id in [(m.tool_calls or [{}])[0].id, m.tool_call_id] %}"
        "{% if id is defined %}{% if id | length != 9 %}{{ raise_exception('nine') }}{% endif %}[{{ id }}]{% endif %}"
        "{% endfor %}{% endfor %}",
    )
    tokenizer = Tokenizer.from_pretrained(tmp_path)

    def shown(call_id: str) -> list[str]:
        result = {"role": "tool", "content": "3", "tool_call_id": call_id}
        calling = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": call_id}]}
        return prompt(tokenizer, messages=[MESSAGES[0], calling, result]).split("[")[1:]

    assert shown("abcdefghi") == ["abcdefghi]3", "abcdefghi]"]
    (called, told), (other, _) = shown("call_1_weather"), shown("call_2_weather")
    assert called == f"{told}3" != other


LLAMA_CALLS = (
    "{% for m in messages %}{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{{ '{' + m.tool_calls[0].function.name + (m.tool_calls[0].function.arguments | tojson) + '}' }}"
    "{% elif m.role == 'tool' %}[{{ m.content }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
GPT_OSS_CALLS = (
    "{% set last = namespace(name='') %}{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('one or the other') }}{% endif %}"
    "{{ m.thinking or m.content }}{% set last.name = m.tool_calls[0].function.name %}"
    "{{ '{' + last.name + (m.tool_calls[0].function.arguments | tojson) + '}' }}"
    "{% elif m.role == 'tool' %}[{{ last.name }}:{{ m.content }}]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def calls_and_results(*names: str) -> list[dict[str, Any]]:
    """Return a message that calls these functions, and their results in the opposite order."""
    calls = [{**CALL, "id": name, "function": {"name": name, "arguments": "{}"}} for name in names]
    results = [{"role": "tool", "content": f"of {name}", "tool_call_id": name} for name in reversed(names)]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAMA_CALLS, "Count.{a{}}[of a]{b{}}[of b]{c{}}[of c][of none]So."),
        (GPT_OSS_CALLS, "Count.{a{}}[a:of a]{b{}}[b:of b]{c{}}[c:of c][c:of none]So."),
    ],
    ids=["llama", "gpt-oss"],
)
def test_a_template_that_shows_one_call_is_shown_them_one_after_the_other(
    tmp_path: Path, template: str, expected: str
) -> None:
    """Llama 3's refuses several calls in one message, and gpt-oss' leaves them out."""
    train_tokenizer(tmp_path, template=template)
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    stray = {"role": "tool", "content": "of none", "tool_call_id": "none"}
    turns = [MESSAGES[0], *calls_and_results("a", "b", "c"), stray, {"role": "assistant", "content": "So."}]
    assert prompt(tokenizer, messages=turns) == expected


def test_a_template_that_shows_several_calls_gets_them_in_one_message(tmp_path: Path) -> None:
    train_tokenizer(tmp_path, template="{% for m in messages %}{{ m.tool_calls | default([]) | tojson }}|{% endfor %}")
    turns = [MESSAGES[0], *calls_and_results("a", "b")]
    assert prompt(Tokenizer.from_pretrained(tmp_path), messages=turns).count("|") == 4


def test_text_before_a_call_ends_the_reasoning_where_a_template_takes_only_one_of_them(tmp_path: Path) -> None:
    """gpt-oss' refuses both, and gpt-oss writes both: reasoning, a preamble, a call."""
    train_tokenizer(tmp_path, template=GPT_OSS_CALLS)
    tokenizer = Tokenizer.from_pretrained(tmp_path)

    def shown(**words: Any) -> str:
        calling, *results = calls_and_results("a", "b")
        return prompt(tokenizer, messages=[MESSAGES[0], calling | words, *results])

    rest = "{a{}}[a:of a]{b{}}[b:of b]"
    assert shown(content="I look.", reasoning_content="Hm.") == f"Count.Hm.\n\nI look.{rest}"
    assert shown(content="I look.") == f"Count.I look.{rest}"
    assert shown(reasoning_content="Hm.") == f"Count.Hm.{rest}"


@pytest.mark.parametrize(
    "written",
    ["'\\n```json\\n' + c.function.arguments + '\\n```'", "'\\n```json\\n' + c.function.arguments|string + '\\n```'"],
    ids=["refused as an object", "shown as Python"],
)
def test_arguments_are_text_where_a_template_does_not_write_them_as_json(tmp_path: Path, written: str) -> None:
    """DeepSeek-R1's published template appends them to a text, and Apriel's makes a text of them."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ WRITTEN }}{% endfor %}{% endfor %}"
    )
    train_tokenizer(tmp_path, template=template.replace("WRITTEN", written))
    tokenizer = Tokenizer.from_pretrained(tmp_path)
    call = {**CALL, "function": {"name": "count", "arguments": '{"of":"Köln", "all": true}'}}
    turns = [MESSAGES[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert prompt(tokenizer, messages=turns) == 'Count.\n```json\n{"of": "Köln", "all": true}\n```'
