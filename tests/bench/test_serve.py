"""The load generator against a server that knows exactly what it was asked, and when."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from swiftkv.bench import datasets, report
from swiftkv.bench.client import TimedAnswer
from swiftkv.bench.options import make_parser
from swiftkv.bench.serve import arrival_times_s, main
from swiftkv.checkpoint import train_tokenizer

# The keys that `vllm bench serve --save-result --save-detailed` writes for text.
VLLM_KEYS = set(
    "date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency "  # noqa: SIM905
    "duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput "
    "output_throughput total_token_throughput input_lens output_lens ttfts itls latencies start_times queue_times "
    "generated_texts errors max_output_tokens_per_s max_concurrent_requests "
    "mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms "
    "mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms".split()
)

TEXT = "x\u2028 "
"""The text of every token; the character in it ends a line for `str.splitlines`."""


@dataclass
class Server:
    """Answers any prompt with as many tokens as asked for; a completion's token ids are 7, 7, 7, …"""

    tokenizer_dir: str | None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/v1/models")
        async def models() -> Any:
            return {"data": [{"id": "chat", "root": self.tokenizer_dir}, {"id": "code", "root": self.tokenizer_dir}]}

        @app.post("/v1/completions")
        async def completions(request: Request) -> Any:
            return await self.answer(request, is_chat=False)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            return await self.answer(request, is_chat=True)

        return app

    async def answer(self, request: Request, *, is_chat: bool) -> Any:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if body.get("temperature") == 0.5:
            return JSONResponse({"error": {"message": "not half"}}, 400)
        return StreamingResponse(self.stream(body, is_chat), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], is_chat: bool) -> AsyncIterator[str]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        num_out = body["max_completion_tokens" if is_chat else "max_tokens"]
        prompt = body["messages"] if is_chat else body["prompt"]
        num_in = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        if is_chat:
            yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for i in range(num_out):
            await asyncio.sleep(0)
            choice = {"delta": {"content": TEXT}} if is_chat else {"text": TEXT, "token_ids": [7]}
            yield event({"choices": [choice | {"finish_reason": "length" if i == num_out - 1 else None}]})
        self.running -= 1
        usage = {"prompt_tokens": num_in, "completion_tokens": num_out, "prompt_tokens_details": {"cached_tokens": 1}}
        yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([Path(__file__).read_text()], 600).save_pretrained(path)
    return str(path)


@pytest.fixture
def server(tokenizer_dir: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    state = Server(tokenizer_dir)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    state.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    uvicorn_server = uvicorn.Server(uvicorn.Config(state.app(), log_level="warning"))
    thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield state
    uvicorn_server.should_exit = True
    thread.join()


def bench(server: Server, *flags: str) -> int:
    return main(["--base-url", server.url, "--disable-tqdm", *flags])


def test_result_has_vllms_keys_and_the_servers_counts(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--model code --num-prompts 12 --random-input-len 20 --random-output-len 5 --max-concurrency 3 --seed 1"
    saving = ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    assert bench(server, *flags.split(), *saving, "--metadata", "tp=1", "--goodput", "ttft:60000", "tpot:60000") == 0
    result = json.loads((tmp_path / "r.json").read_text())
    assert VLLM_KEYS | {"tp"} <= set(result)
    assert result["completed"] == len(server.bodies) == 12
    assert (result["failed"], result["errors"]) == (0, [""] * 12)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (240, 60)
    assert result["total_cached_tokens"] == 12
    assert result["generated_texts"] == [TEXT * 5] * 12
    assert server.most_running <= 3
    assert result["max_concurrent_requests"] <= 3
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert all(len(itls) == 4 for itls in result["itls"])
    for ttft, itls, latency in zip(result["ttfts"], result["itls"], result["latencies"], strict=True):
        assert latency == pytest.approx(ttft + sum(itls))
    body = server.bodies[0]
    assert (body["model"], body["stream"], body["ignore_eos"], len(body["prompt"])) == ("code", True, True, 20)
    printed = capsys.readouterr().out
    assert "Successful requests:                     12" in printed
    assert "P99 TTFT (ms):" in printed


def test_without_details_the_file_is_small(server: Server, tmp_path: Path) -> None:
    flags = "--num-prompts 2 --input-len 4 --output-len 2 --percentile-metrics ttft,e2el --metric-percentiles 50,99.9"
    path = tmp_path / "r.json"
    for _ in range(2):
        assert bench(server, *flags.split(), "--append-result", "--result-filename", str(path)) == 0
    results = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(results) == 2
    assert not {"ttfts", "itls", "generated_texts", "mean_tpot_ms"} & set(results[0])
    assert {"p50_e2el_ms", "p99.9_ttft_ms"} <= set(results[0])
    assert results[0]["model_id"] == "chat"  # the first that is served


def test_same_seed_same_prompts(server: Server) -> None:
    flags = "--num-prompts 3 --random-input-len 9 --random-output-len 2 --random-prefix-len 4 --random-range-ratio 0.5"
    for seed in ("1", "1", "2"):
        assert bench(server, *flags.split(), "--max-concurrency", "1", "--seed", seed) == 0
    prompts = [body["prompt"] for body in server.bodies]
    assert prompts[:3] == prompts[3:6] != prompts[6:]
    assert len({tuple(prompt[:4]) for prompt in prompts[:3]}) == 1
    assert all(4 + 4 <= len(prompt) <= 4 + 14 for prompt in prompts)


def test_chat_turns_carry_what_was_said(server: Server) -> None:
    flags = "--backend openai-chat --dataset-name multi_turn --num-prompts 2 --multi-turn-num-turns 3 --output-len 2"
    assert bench(server, *flags.split(), "--max-concurrency", "1") == 0
    assert len(server.bodies) == 6
    longest = max(server.bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [message["role"] for message in longest] == ["user", "assistant", "user", "assistant", "user"]
    assert longest[1]["content"] == TEXT * 2


def test_completion_turns_carry_the_token_ids(server: Server) -> None:
    flags = "--dataset-name multi_turn --num-prompts 1 --multi-turn-num-turns 2 --multi-turn-first-len 8"
    assert bench(server, *flags.split(), "--multi-turn-turn-len", "3", "--output-len", "2") == 0
    first, second = (body["prompt"] for body in server.bodies)
    assert second[: 8 + 2] == [*first, 7, 7]
    assert len(second) == 8 + 2 + 3
    assert server.bodies[0]["return_token_ids"] is True


def test_prefix_repetition_shares_prefixes(server: Server) -> None:
    flags = "--dataset-name prefix_repetition --num-prompts 6 --prefix-repetition-prefix-len 5"
    more = "--prefix-repetition-suffix-len 2 --prefix-repetition-num-prefixes 2 --prefix-repetition-output-len 1"
    assert bench(server, *flags.split(), *more.split()) == 0
    prefixes = [tuple(body["prompt"][:5]) for body in server.bodies]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [3, 3]


def test_custom_and_sharegpt_files(server: Server, tmp_path: Path) -> None:
    lines = tmp_path / "questions.jsonl"
    lines.write_text('{"prompt": "one two", "output_tokens": 3}\n\n{"prompt": "three"}\n')
    flags = ["--dataset-path", str(lines), "--num-prompts", "4", "--max-concurrency", "1", "--disable-shuffle"]
    assert bench(server, "--dataset-name", "custom", *flags, "--output-len", "1") == 0
    assert server.bodies[0]["prompt"] == "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n"
    assert server.bodies[0]["prompt"] == server.bodies[2]["prompt"]
    server.bodies.clear()
    assert bench(server, "--dataset-name", "custom", *flags[:3], "1", *flags[4:], "--skip-chat-template") == 0
    assert (server.bodies[0]["prompt"], server.bodies[0]["max_tokens"]) == ("one two", 256)
    server.bodies.clear()

    said = [{"from": "human", "value": "What is it, please?"}, {"from": "gpt", "value": "It is a list of things."}]
    shared = tmp_path / "shared.json"
    shared.write_text(json.dumps([{"conversations": said}, {"conversations": said[:1]}]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(shared), "--num-prompts", "2"]
    assert bench(server, *flags) == 0
    assert [body["prompt"] for body in server.bodies] == ["What is it, please?"] * 2
    assert server.bodies[0]["max_tokens"] >= 4


def test_headers_key_and_extra_body(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    flags = ["--num-prompts", "1", "--input-len", "2", "--output-len", "1", "--skip-tokenizer-init"]
    more = ["--header", "x-tenant=a", "--extra-body", '{"cache_salt": "s"}', "--top-k", "5", "--num-warmups", "1"]
    assert bench(server, *flags, *more, "--ready-check-timeout-sec", "5") == 0
    assert len(server.bodies) == 3
    assert (server.bodies[-1]["cache_salt"], server.bodies[-1]["top_k"]) == ("s", 5)
    assert (server.headers[-1]["authorization"], server.headers[-1]["x-tenant"]) == ("Bearer secret", "a")


def test_refused_requests_are_counted(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-prompts 3 --input-len 2 --output-len 1 --temperature 0.5 --goodput e2el:60000"
    assert bench(server, *flags.split()) == 1
    captured = capsys.readouterr()
    assert "Failed requests:                         3" in captured.out
    assert "failed: HTTP 400" in captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model nobody", r"--model: 'nobody' is not served at .*; it has chat, code"),
        ("--goodput itl:5", "--goodput: 'itl:5' is not like ttft:500"),
        ("--percentile-metrics ttft,speed", "--percentile-metrics: 'speed' is not one of ttft"),
        ("--metric-percentiles 101", "--metric-percentiles: '101'"),
        ("--request-rate 0", "--request-rate.* greater than 0"),
        ("--max-concurrency 0", "--max-concurrency"),
        ("--num-warmups -3", "--num-warmups must be at least 0"),
        ("--random-input-len -5", "--random-input-len must be at least 0"),
        ("--random-prefix-len -1", "--random-prefix-len must be at least 0"),
        ("--skip-tokenizer-init --vocab-size 0", "--vocab-size must be at least 2"),
        ("--extra-body [1]", "--extra-body is an object"),
        ("--endpoint foo", "--endpoint: 'foo' is not a path"),
        ("--goodput ttft:nan", "--goodput: 'ttft:nan'"),
        ("--metadata foo --save-result", "--metadata: 'foo' is not KEY=VALUE"),
        ("--save-result --result-dir /proc/x", "--result-dir: /proc/x cannot be made"),
        ("--random-range-ratio 1.5", "--random-range-ratio: 1.5"),
        ("--dataset-name custom", "--dataset-path"),
        ("--dataset-name custom --dataset-path /nowhere.jsonl", "cannot read /nowhere.jsonl"),
        ("--header nonsense", "--header: 'nonsense' is not KEY=VALUE"),
        ("--tokenizer /nowhere", "--tokenizer: cannot load '/nowhere'"),
    ],
)
def test_mistakes_are_one_line(server: Server, capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    assert bench(server, "--num-prompts", "1", *flags.split()) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert re.search(message, lines[0]), lines[0]
    assert not server.bodies


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("custom", "5\n", ":1: Expected `object`, got `int`"),
        ("custom", '{"prompt": "a"}\n\n{"text": "b"}\n', ":3: Object missing required field `prompt`"),
        ("sharegpt", '["a"]', "Expected `object`, got `str`"),
        ("sharegpt", '[{"conversations": [{"value": "a"}, {}]}]', "missing required field `value`"),
        ("sharegpt", '[{"conversations": "a"}]', "Expected `array | null`, got `str`"),
    ],
)
def test_a_dataset_of_another_shape_is_one_line(
    server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str, why: str
) -> None:
    (tmp_path / "data").write_text(text)
    flags = ["--dataset-name", name, "--dataset-path", str(tmp_path / "data"), "--num-prompts", "1"]
    assert bench(server, *flags) == 2
    assert why in capsys.readouterr().err
    assert not server.bodies


def test_directories_of_a_result_are_made(server: Server, tmp_path: Path) -> None:
    saving = ["--save-result", "--result-dir", str(tmp_path / "new"), "--result-filename", "deeper/r.json"]
    assert bench(server, "--num-prompts", "1", "--input-len", "2", "--output-len", "1", *saving) == 0
    assert (tmp_path / "new/deeper/r.json").exists()


def test_a_line_of_a_dataset_ends_only_at_a_line_feed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data").write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
    flags = ["--dataset-name", "custom", "--dataset-path", str(tmp_path / "data"), "--num-prompts", "1"]
    assert bench(server, *flags, "--output-len", "1") == 0


def test_the_help_tells_every_default() -> None:
    texts = [" ".join(text.split()) for text in re.split(r"\n(?:  (?=-)|\n)", make_parser().format_help())]
    told = {text.split()[0]: text for text in texts if text.startswith("--")}
    for flag, value in vars(make_parser().parse_args([])).items():
        text = told[f"--{flag.replace('_', '-')}"]
        if value in (None, []) or value is False:
            assert not text.endswith(f"default: {value}")
        else:
            assert text.endswith(f"default: {value}")


@pytest.mark.parametrize("root", ["chat", None])
def test_a_server_that_does_not_tell_its_tokenizer(
    server: Server, capsys: pytest.CaptureFixture[str], root: str | None
) -> None:
    """The hub is not asked for a model of that name."""
    server.tokenizer_dir = root
    assert bench(server, "--model", "chat", "--num-prompts", "1") == 2
    assert capsys.readouterr().err.startswith("swiftkv bench serve: --tokenizer: the server does not say where")
    assert not server.bodies


def test_the_model_names_the_tokenizer_of_a_server_that_does_not_tell(server: Server, tmp_path: Path) -> None:
    directory, server.tokenizer_dir = server.tokenizer_dir, "chat"
    assert directory is not None
    flags = ["--model", directory, "--served-model-name", "chat", "--num-prompts", "1", "--output-len", "1"]
    saving = ["--save-result", "--result-filename", str(tmp_path / "r.json")]
    assert bench(server, *flags, *saving) == 0
    assert json.loads((tmp_path / "r.json").read_text())["tokenizer_id"] == directory


def test_the_environment_names_the_server(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTKV_URL", server.url.removeprefix("http://"))
    flags = ["--num-prompts", "1", "--input-len", "2", "--output-len", "1", "--disable-tqdm"]
    assert main(flags) == 0
    assert len(server.bodies) == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main([*flags, "--port", str(port)]) == 2
    assert len(server.bodies) == 1


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main(["--port", str(port)]) == 2
    assert f"http://127.0.0.1:{port}/v1/models" in capsys.readouterr().err


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 4.0, np.inf])
def test_arrivals_offer_the_rate_that_was_asked_for(burstiness: float) -> None:
    times_s = np.array(arrival_times_s(20_000, 10.0, burstiness, np.random.default_rng(0)))
    gaps_s = np.diff(times_s)
    assert times_s[-1] == pytest.approx(2000.0)
    assert (gaps_s >= 0).all()
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(burstiness**-0.5, abs=0.05)
    assert arrival_times_s(3, np.inf, burstiness, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_figures_of_known_answers() -> None:
    """Worked by hand: two requests overlap from 1 s to 2 s, a third failed."""
    answers = [
        TimedAnswer(
            start_s=10.0, ttft_s=0.5, itls_s=[0.5, 1.0], latency_s=2.0, num_prompt_tokens=8, num_output_tokens=3
        ),
        TimedAnswer(
            start_s=11.0, ttft_s=0.1, latency_s=0.1, num_prompt_tokens=4, num_output_tokens=1, num_cached_tokens=4
        ),
        TimedAnswer(start_s=11.5, error="HTTP 503"),
    ]
    figures = report.summarize(
        answers, 4.0, metrics=["ttft", "tpot", "itl"], percentiles=[50], goodput_ms={"ttft": 200.0, "tpot": 100.0}
    )
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["request_throughput"], figures["request_goodput"]) == (0.5, 0.25)
    assert (figures["output_throughput"], figures["total_token_throughput"]) == (1.0, 4.0)
    assert figures["mean_ttft_ms"] == pytest.approx(300.0)
    assert figures["mean_tpot_ms"] == pytest.approx(750.0)
    assert figures["p50_itl_ms"] == pytest.approx(750.0)
    assert figures["max_concurrent_requests"] == 2
    assert figures["max_output_tokens_per_s"] == 2.0
    assert figures["total_cached_tokens"] == 4


def test_random_ids_avoid_special_tokens() -> None:
    tokens = datasets.Tokens(600, frozenset({0, 450, 451}))
    ids = tokens.random(np.random.default_rng(0), 20_000)
    assert {450, 451}.isdisjoint(ids)
    assert (min(ids), max(ids)) == (300, 599)
