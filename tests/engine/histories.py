"""Random histories of a real engine, each answer of which must be that of the plainest engine, to the bit.

The plainest engine has no cache, no tiers and nothing borrowed. A seed draws a model, a configuration and what happens;
threads decide how that falls between steps, so a seed that failed may have to be run several times to fail again.

It is one file of more than 400 lines, so that what a history does stands beside what it may find.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import yaml

from swiftkv._core import PRIORITIES_PER_CLASS, StepPlan
from swiftkv.config import load_config
from swiftkv.engine.engine import Engine
from swiftkv.engine.lending import links_of
from swiftkv.engine.messages import (
    AddRequest,
    AttachStorage,
    CacheCall,
    CacheCommand,
    CacheReport,
    DetachStorage,
    FromEngine,
    Pin,
    PinPrompt,
    PromptLookup,
    ReasoningMarks,
    SamplingParams,
    Sleep,
    Slept,
    StepOutput,
    Unpin,
    Wake,
    Woken,
)
from swiftkv.engine.runner import ModelRunner
from swiftkv.engine_configs import compile_engines
from swiftkv.errors import TransferError
from swiftkv.grammars import GrammarSource, library_form
from swiftkv.models.registry import read_config
from swiftkv.planning.node import plan_node
from swiftkv.planning.transports import lending_transports
from swiftkv.storage.host_medium import make_host_memory
from swiftkv.tier.messages import TierSpec
from swiftkv.tier.rates import LoadPlanner
from tests.engine.engine_process import Answer
from tests.engine.engine_thread import EngineThread
from tests.lease.lending_process import Admin
from tests.support.checkpoints import SHAPE, make_checkpoint
from tests.support.lanes import LateRunner
from tests.support.node_process import wait_for

FULL, WINDOW = "full_attention", "sliding_attention"
_WINDOWS = {"use_sliding_window": True, "sliding_window": 40}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"arch": "llama"},
    "hybrid": {"arch": "qwen3", "num_hidden_layers": 3, "layer_types": [WINDOW, FULL, WINDOW], **_WINDOWS},
    "gpt_oss": {"arch": "gpt_oss", "num_hidden_layers": 3},
    "mimo": {"arch": "mimo"},
    "windows": {"arch": "mistral", "sliding_window": 33},
    "experts": {"arch": "qwen3_moe"},
}
LENDER: dict[str, Any] = {"arch": "llama", "seed": 5, "num_hidden_layers": 4, "num_key_value_heads": 4}
MAX_MODEL_LEN = 400
MAX_IN_FLIGHT = 24
GRAMMARS = (
    library_form(GrammarSource("regex", "(19|20)[0-9]{2}-(0[1-9]|1[0-2])")),
    library_form(GrammarSource("choice", json.dumps(["yes", "no", "perhaps so"]))),
)


class HistoryEngine(EngineThread[ModelRunner]):
    """An engine whose invariants are checked after its steps, and whose copies of borrowed KV sometimes fail."""

    engine: Engine

    def __init__(
        self,
        checkpoint: Path,
        failing: float = 0.0,
        seed: int = 0,
        runner: type[ModelRunner] = ModelRunner,
        **options: Any,
    ) -> None:
        """`failing` is the share of steps with copies that fail, before or after the model has run."""
        super().__init__(checkpoint, runner, **options)
        self._failing = failing
        self._random = random.Random(seed)
        self.num_failed = 0
        self.reports: dict[int, CacheReport] = {}
        self.rests: list[Slept | Woken] = []
        self.met: set[int] = set()  # requests that skipped a back that was loaded while they computed their front

    def prepare(self, engine: Engine) -> None:
        step, forward = engine.step, engine._runner.forward

        def checked_step() -> bool:
            goes_on = step()
            engine._scheduler.check_invariants()
            return goes_on

        def failing_forward(plan: StepPlan) -> torch.Tensor:
            if not plan.has_copies or self._random.random() >= self._failing:
                return forward(plan)
            links = links_of(plan, len(engine._runner.group_specs))
            if links and self._random.random() < 0.5:
                forward(plan)
                engine._runner.fence().wait()
            self.num_failed += 1
            raise TransferError("a copy that the test has fail", links)

        engine.step = checked_step  # type: ignore[method-assign]
        engine._runner.forward = failing_forward  # type: ignore[assignment, method-assign]
        self.engine = engine

    @contextmanager
    def running(self) -> Iterator[None]:
        with super().running():
            wait_for("the engine to begin", lambda: hasattr(self, "engine"))
            yield

    def take(self, message: FromEngine) -> None:
        if isinstance(message, CacheReport):
            self.reports[message.call] = message
        elif isinstance(message, Slept | Woken):
            self.rests.append(message)
        else:
            if isinstance(message, StepOutput):
                again = (a.request_id for a in message.admitted if self.answers[a.request_id].cached_tokens is not None)
                self.met.update(again)
            super().take(message)

    def ask(self, call: CacheCall) -> CacheReport:
        self.send(call)
        while call.call not in self.reports:
            self.take_one()
        return self.reports[call.call]

    def push(self, prompt: Sequence[int], sampling: SamplingParams, **options: Any) -> int:
        request_id = next(self._ids)
        self.answers[request_id] = Answer()
        self.send(AddRequest(request_id, np.array(prompt, np.int32).tobytes(), sampling, **options))
        return request_id

    def pump(self, max_messages: int, wait_s: float = 0.0) -> None:
        """Take messages that have come, or come in time."""
        for _ in range(max_messages):
            if not self.says_something(wait_s):
                break
            self.take_one()

    def left_behind(self) -> dict[str, object]:
        """Return what an engine without requests has kept of any, by name."""
        engine, stats = self.engine, self.engine._scheduler.stats()
        loads = getattr(engine._tier._tier, "_loads", None)
        kept = {
            "requests": engine._requests,
            "admitted": engine._admitted,
            "grammars": engine._grammars._held,
            "compiling": engine._grammars._waiting,
            "rules": engine._rules._places,
            "prompt logprobs": engine._prompt_logprobs._waiting,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "held by storage": loads and loads._waits,
            "expected of storage": loads and loads._expected,
            "reasons": loads and loads.why_less,
            "reading": loads and loads._reading_bytes,
            "pins of searches": engine._tier._host and engine._tier._host._num_searched,
        }
        for number, group in enumerate(stats.groups):
            states = ("in_flight", "loading", "borrowed_used", "borrowed_in_flight", "host_in_flight", "host_loading")
            kept |= {f"{state} of group {number}": getattr(group, state) for state in states}
            kept[f"used of group {number}"] = group.used + group.host_used - group.pinned
        return {name: what for name, what in kept.items() if what}


class Checkpoints:
    """Checkpoints by name, made when they are asked for, and the answers of the plainest engine of each."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._engines = ExitStack()
        self._plain: dict[tuple[str, str], HistoryEngine] = {}
        self._known: dict[tuple[object, ...], Answer] = {}

    def path(self, name: str) -> Path:
        path = self._directory / name
        if not path.exists():
            shape = LENDER if name == "lender" else MODELS[name]
            make_checkpoint(path, tokenizer=True, max_position_embeddings=4096, **shape)
        return path

    def learn(self, name: str, dtype: str, asked: Sequence[tuple[list[int], SamplingParams]]) -> list[Answer]:
        """Return the right answers."""
        if (name, dtype) not in self._plain:
            plain = HistoryEngine(
                self.path(name), dtype=dtype, enable_prefix_caching=False, max_model_len=MAX_MODEL_LEN
            )
            self._engines.enter_context(plain.running())
            self._plain[name, dtype] = plain
        plain = self._plain[name, dtype]
        keys = [(name, dtype, *prompt, msgspec.msgpack.encode(sampling)) for prompt, sampling in asked]
        new = {key: one for key, one in zip(keys, asked, strict=True) if key not in self._known}
        request_ids = [plain.push(*one) for one in new.values()]
        self._known |= zip(new, plain.wait(request_ids), strict=True)
        return [self._known[key] for key in keys]

    def close(self) -> None:
        self._engines.close()


class History:
    """One history: `run` lets it happen and compares; `reached` counts what it came to."""

    def __init__(self, seed: int, checkpoints: Checkpoints, directory: Path, *, has_host: bool = False) -> None:
        """`has_host`: there is host memory in any case, and steps attend to blocks there if the model allows it."""
        self._random = rng = random.Random(seed)
        self._has_host = has_host
        self._runner = LateRunner if seed % 2 else ModelRunner  # storage reaches the pool as one on a device
        self._checkpoints = checkpoints
        self._directory = directory
        self.reached: Counter[str] = Counter()
        self.model = rng.choice([*MODELS])
        self.dtype = rng.choice(["float32", "bfloat16"])
        self.block_size = rng.choice([16, 16, 32])
        groups = read_config(checkpoints.path(self.model)).kv_groups(self.block_size, self.dtype)
        self._block_bytes = sum(group.block_bytes for group in groups)
        self._window = max(group.window for group in groups)
        full_bytes = [group.block_bytes for group in groups if group.kind != "window"]
        self._chunk_bytes = (
            full_bytes[0] if full_bytes and (seed % 5 or has_host) else 4096
        )  # blocks are attended in host memory
        self._has_lender = rng.random() < 0.5
        self._lender: HistoryEngine | None = None
        self._host_fd: int | None = None
        self._options = self._draw_options(len(groups))
        if self._has_lender:
            self._plan_lending()
        self._storage = self._draw_storage() if rng.random() < 0.7 or has_host else None
        self._texts = [self._tokens(rng.randint(20, 380)) for _ in range(3)]
        self._live: dict[int, tuple[list[int], SamplingParams]] = {}
        self._lent_to: dict[int, tuple[list[int], SamplingParams]] = {}  # the lender's own requests
        self._aborted: set[int] = set()
        self._pins: list[int] = []  # calls
        self._calls, self._changes = count(1), count(1)

    def run(self, num_events: int) -> None:
        with ExitStack() as stack:
            stack.callback(lambda: None if self._host_fd is None else os.close(self._host_fd))
            while num_events > 0:
                life = min(num_events, self._random.choice([40, 150]))
                self._live_through(life)
                num_events -= life

    def _live_through(self, num_events: int) -> None:
        """Let the life of one engine happen; what it stored, the next one finds.

        Its lender begins and ends with it: leases last as long as the process, which is the same for all engines here.
        """
        with ExitStack() as stack:
            if self._has_lender:
                self._lender = HistoryEngine(self._checkpoints.path("lender"), **self._lender_options)
                stack.enter_context(self._lender.running())
                self._admin = Admin(self._lender_options["lending"].leases_address)
                stack.callback(self._admin.close)
            self._engine = self._new_engine()
            stack.enter_context(self._engine.running())
            if self._has_lender:
                wait_for("it to lend", lambda: any(group.borrowed_free for group in self._groups()))
            for _ in range(num_events):
                self._act()
            self._settle()
            self._empty()

    # what is drawn

    def _tokens(self, length: int) -> list[int]:
        return [self._random.randrange(3, int(str(SHAPE["vocab_size"]))) for _ in range(length)]

    def _draw_options(self, num_groups: int) -> dict[str, Any]:
        rng = self._random
        sequence = MAX_MODEL_LEN // self.block_size + 1
        num_blocks = rng.choice([sequence, sequence + 3, 2 * sequence, 4 * sequence])
        is_drafting = rng.random() < 0.4
        return {
            "dtype": self.dtype,
            "block_size": self.block_size,
            "max_model_len": MAX_MODEL_LEN,
            "kv_bytes": num_blocks * self._block_bytes,
            "max_num_seqs": rng.choice([2, 4, 8, 16]),
            "max_num_batched_tokens": rng.choice([16, 17, 33, 64, 100, 256]),
            "scheduling_policy": rng.choice(["fcfs", "priority", "spf", "hrrn", "turns", "deadline"]),
            "async_scheduling": not is_drafting and rng.random() < 0.6,
            "prompt_lookup": PromptLookup(rng.choice([1, 3, 7]), 1, rng.choice([1, 8])) if is_drafting else None,
            "shares_extents": num_groups > 1 and rng.random() < 0.5,
            "max_pinned_share": rng.choice([0.25, 0.9]),
            "target_tpot_s": rng.choice([None, 0.002]),
            "long_prefill_token_threshold": rng.choice([None, 32]),
            "max_num_partial_prefills": rng.choice([None, 1, 2]),
            "retention_interval": rng.choice([None, None, 32]),
        }

    def _plan_lending(self) -> None:
        """Replace the pool by one that is too small alone, beside a lender."""
        rng = self._random
        shared = {"dtype": self.dtype, "threads": 1}
        own_bytes = rng.choice([14, 20, 30]) * self._block_bytes
        borrower = {
            "name": "borrower",
            "role": "master",
            "path": str(self._checkpoints.path(self.model)),
            "max_num_seqs": self._options["max_num_seqs"],
            "max_num_batched_tokens": self._options["max_num_batched_tokens"],
            "kv_cache": {"memory": f"{own_bytes // 1024}KiB", "block_size": self.block_size},
        }
        lender = {
            "name": "lender",
            "path": str(self._checkpoints.path("lender")),
            "max_model_len": MAX_MODEL_LEN,
            "kv_cache": {"memory": "3MiB"},
            "lending": {"budget": "100%", "window": "50ms"},
        }
        node = {"lending": {"stream_buffers": rng.choice([1, 2]), "transport": "shm", "max_wait": "2s"}}
        file, sockets = self._directory / "node.yaml", self._directory / "s"
        sockets.mkdir(mode=0o700)
        file.write_text(yaml.safe_dump({"node": node, "models": [shared | borrower, shared | lender]}))
        config = load_config(file)
        plans = plan_node(config, need_weights=True)
        numbers = {plan.name: number for number, plan in enumerate(plans)}
        ours, theirs = compile_engines(config, plans, lending_transports(config, plans), sockets, numbers)
        kept = ("name", "memory", "lending", "shares_extents")
        self._options |= {key: getattr(ours, key) for key in kept}
        kept = (*kept, "dtype", "block_size", "max_model_len")
        self._lender_options = {key: getattr(theirs, key) for key in kept} | {"max_num_batched_tokens": 128}
        assert ours.max_model_len >= MAX_MODEL_LEN

    def _draw_storage(self) -> TierSpec:
        rng = self._random
        if self._host_fd is None and (rng.random() < 0.4 or self._has_host):
            self._host_fd = make_host_memory(rng.choice([1 << 20, 8 << 20]), self._chunk_bytes)
        size = max(rng.choice([20, 300]) * self._block_bytes, 1 << 18)
        backend: dict[str, Any] = {"backend": "file", "path": str(self._directory / "kv"), "size": size, "min_free": 0}
        if rng.random() < 0.5:
            rates = {kind: rng.choice([0, 0, 0.05, 0.3]) for kind in ("fail", "flip", "truncate", "delay")}
            backend = {"backend": "fault", "inner": backend, **rates, "delay_time": rng.choice(["5ms", "100ms"])}
        return TierSpec(
            None if self._host_fd is not None and rng.random() < 0.3 else backend,
            "/",
            host_fd=self._host_fd,
            write_policy=rng.choice(["write_through", "write_through_selective", "write_back"]),
            prefetch_policy=rng.choice(["timeout", "timeout", "best_effort", "wait_complete"]),
            prefetch_threshold=rng.choice([1, self.block_size, 64]),
            prefetch_timeout_base_s=rng.choice([0.01, 0.5]),
            queue_bytes=rng.choice([1 << 18, 8 << 20]),
        )

    def _new_engine(self) -> HistoryEngine:
        seed, failing = self._random.randrange(1 << 30), self._random.choice([0.0, 0.01])
        checkpoint = self._checkpoints.path(self.model)
        return HistoryEngine(checkpoint, failing, seed, self._runner, storage=self._storage, **self._options)

    def _draw_prompt(self) -> list[int]:
        """Return a prompt that begins like another one, and parts from it beside a border of a block or a window."""
        rng = self._random
        text = rng.choice(self._texts)
        border = self.block_size * rng.randint(0, len(text) // self.block_size) + rng.choice([0, self._window])
        cut = rng.choice([len(text), border + rng.randint(-2, 2), rng.randint(0, len(text))])
        prompt = text[: max(0, cut)] + self._tokens(rng.choice([0, 0, 1, 2, 15, 16, 17, rng.randint(0, 90)]))
        return prompt[: MAX_MODEL_LEN - rng.choice([1, 2, 40])] or [7]

    def _draw_sampling(self) -> SamplingParams:
        rng = self._random
        values: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 5, 12, 17, 33, 60]), "temperature": 0.0}
        values["ignore_eos"] = rng.random() < 0.8
        some: list[tuple[float, Callable[[], dict[str, Any]]]] = [
            (0.5, lambda: {"temperature": rng.choice([0.5, 1.7]), "seed": rng.randrange(1 << 32)}),
            (0.2, lambda: {"top_p": 0.9, "top_k": rng.choice([0, 5, 50]), "min_p": rng.choice([0.0, 0.05])}),
            (0.3, lambda: {"presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3}),
            (0.1, lambda: {"logit_bias": {rng.randrange(3, 320): 5.0}}),
            (0.5, lambda: {"logprobs": 2}),
            (0.1, lambda: {"prompt_logprobs": 2}),
            (0.15, lambda: {"stop_token_ids": rng.sample(range(3, 320), 20)}),
            (0.15, lambda: {"min_tokens": min(values["max_tokens"], rng.choice([3, 10]))}),
            (0.1, lambda: {"grammar": rng.choice(GRAMMARS), "ignore_eos": False}),
            (0.15, lambda: {"bad_words": [rng.choices(range(3, 320), k=rng.choice([1, 1, 2])) for _ in range(200)]}),
            (0.1, lambda: {} if "grammar" in values else {"allowed_token_ids": rng.sample(range(3, 320), 30)}),
            (0.1, lambda: {"reasoning": ReasoningMarks([50, 51]), "thinking_budget": rng.choice([0, 3, 20])}),
        ]
        for chance, draw in some:
            if rng.random() < chance:
                values |= draw()
        return SamplingParams(**values)

    # what happens

    def _act(self) -> None:
        rng, engine = self._random, self._engine
        events = {self._add: 30, self._burst: 8, self._pump: 30, self._abort: 7, self._nap: 5, self._settle: 2}
        events |= {self._clear: 4, self._change_pins: 4, self._change_storage: 2, self._sleep: 1}
        if self._lender is not None:
            events |= {self._change_budget: 8, self._ask_lender: 5}
        rng.choices([*events], [*events.values()])[0]()
        engine.pump(2)
        if self._lender is not None:
            self._lender.pump(4)
        while sum(not engine.answers[request_id].has_ended for request_id in self._live) > MAX_IN_FLIGHT:
            engine.take_one()
            self._live = {k: v for k, v in self._live.items() if k not in self._aborted}

    def _add(self) -> None:
        """Send a prompt once, or several times with other seeds."""
        rng = self._random
        prompt, sampling = self._draw_prompt(), self._draw_sampling()
        for choice in range(rng.choice([1, 1, 2, 3])):
            request_id = self._engine.push(
                prompt,
                sampling := msgspec.structs.replace(sampling, seed=(sampling.seed or 0) + choice),
                cache_salt=rng.choice(["", "", "", "another"]),
                priority=rng.choice([0, 0, -1, PRIORITIES_PER_CLASS, -PRIORITIES_PER_CLASS]),
                target_ttft_s=rng.choice([None, 0.001]),
                flow=rng.choice([0, 0, 1]),
                is_to_last=rng.random() < 0.2,
            )
            self._live[request_id] = prompt, sampling

    def _burst(self) -> None:
        with self._engine.at_once():
            for _ in range(self._random.randint(2, 6)):
                self._add()

    def _pump(self) -> None:
        self._engine.pump(self._random.choice([1, 10, 30]), self._random.choice([0.0, 0.02, 0.1]))

    def _nap(self) -> None:
        time.sleep(self._random.choice([0.001, 0.02]))

    def _abort(self) -> None:
        alive = [k for k in self._live if k not in self._aborted and not self._engine.answers[k].has_ended]
        gone = self._random.sample(alive, min(len(alive), self._random.choice([1, 2, 5])))
        self._engine.abort(*gone)
        self._aborted.update(gone)

    def _clear(self) -> None:
        """Empty the cache, and ask for a known text, which only tiers below have by now."""
        self._engine.send(CacheCommand(next(self._calls), clear=True))
        self._engine.pump(10, 0.02)
        self._add()

    def _change_pins(self) -> None:
        rng, engine = self._random, self._engine
        ttl_s = rng.choice([0.01, 1e6])
        made = [report.pin.pin_id for call in self._pins if (report := engine.reports.get(call)) and report.pin]
        call = next(self._calls)
        if made and rng.random() < 0.4:
            engine.send(Unpin(call, rng.choice(made)))
            return
        self._pins.append(call)
        if self._live and rng.random() < 0.5:
            engine.send(Pin(call, [rng.choice([*self._live])], ttl_s))
        else:
            engine.send(PinPrompt(call, np.array(rng.choice(self._texts), np.int32).tobytes(), "", ttl_s))

    def _change_storage(self) -> None:
        change_id = next(self._changes)
        attaches = self._random.random() < 0.6
        self._engine.send(AttachStorage(change_id, self._draw_storage()) if attaches else DetachStorage(change_id))

    def _sleep(self) -> None:
        self._settle()
        engine = self._engine
        for message in (Sleep(), Wake()):
            before = len(engine.rests)
            engine.send(message)
            while len(engine.rests) == before:
                engine.take_one()

    def _change_budget(self) -> None:
        pool_bytes = self._lender_options["memory"].num_bytes
        self._admin.ask_budget(self._random.choice([0, pool_bytes, self._random.randint(0, pool_bytes)]))

    def _ask_lender(self) -> None:
        assert self._lender is not None
        prompt = [3 + i * i % 311 for i in range(self._random.randint(1, 330))]
        prompt += self._tokens(self._random.choice([1, 20]))
        sampling = SamplingParams(self._random.randint(1, 40), temperature=0.0, ignore_eos=True, logprobs=1)
        self._lent_to[self._lender.push(prompt, sampling)] = prompt, sampling

    # what must hold

    def _settle(self) -> None:
        """Wait for all answers and compare them, and check that nothing is left of their requests."""
        engine = self._engine
        engine.wait(self._live.keys() - self._aborted)
        self._compare(engine, self.model, self._live)
        self._texts = [
            *self._texts,
            *([*prompt, *engine.answers[k].token_ids] for k, (prompt, _) in self._live.items()),
        ]
        self._texts = [self._texts[0], *self._random.sample(self._texts, min(8, len(self._texts)))]
        self._live = {}
        if self._lender is not None:
            self._lender.wait(self._lent_to)
            self._compare(self._lender, "lender", self._lent_to)
            self._lent_to = {}
        wait_for("nothing to be left", self._leaves_nothing)
        self._check_statistics()

    def _leaves_nothing(self) -> bool:
        self._engine.ask(CacheCommand(next(self._calls)))  # it has taken all that was sent before
        return not self._engine.left_behind()

    def _compare(self, engine: HistoryEngine, model: str, asked: dict[int, tuple[list[int], SamplingParams]]) -> None:
        right = self._checkpoints.learn(model, self.dtype, [*asked.values()])
        for (request_id, (prompt, sampling)), expected in zip(asked.items(), right, strict=True):
            answer = engine.answers[request_id]
            what = f"{len(prompt)} tokens, {sampling}, found {answer.hit_tokens}"
            self.reached.update(tier for tier, found in answer.hit_tokens.items() if found)
            self.reached["met"] += request_id in engine.met and engine is self._engine
            if answer.error is not None and answer.error.status == 503 and self._has_lender:
                self.reached["starved"] += 1
            elif request_id not in self._aborted or answer.has_ended or engine is self._lender:
                ends = (answer.token_ids, answer.finish_reason, answer.logprobs, answer.prompt_logprobs, answer.error)
                wanted = (expected.token_ids, expected.finish_reason, expected.logprobs, expected.prompt_logprobs, None)
                assert ends == wanted, what
                assert answer.cached_tokens is not None
                assert answer.cached_tokens < len(prompt), what
                assert sum(answer.hit_tokens.values()) == answer.cached_tokens, what
            begun = len(answer.token_ids)
            assert answer.token_ids == expected.token_ids[:begun], what
            assert answer.logprobs == expected.logprobs[: len(answer.logprobs)], what

    def _check_statistics(self) -> None:
        stats = self._engine.stats
        assert stats is not None
        by_tier = stats.hit_tokens_by_tier()
        assert min(by_tier.values()) >= 0
        assert sum(by_tier.values()) == stats.prefix_hit_tokens_total
        if not self._aborted:
            found = Counter[str]()
            for answer in self._engine.answers.values():
                found.update(answer.hit_tokens)
            assert +found == +Counter(by_tier)

    def _empty(self) -> None:
        """Unpin and forget everything: every block is free, or waits for storage to write it."""
        engine, stats = self._engine, self._engine.stats
        assert stats is not None
        self.reached["preempted"] += stats.num_preemptions_total > 0
        self.reached["displaced"] += sum(stats.num_displaced_total) > 0
        self.reached["window missed"] += stats.window_missed_tokens_total > 0
        self.reached["extents shared"] += any(group.elsewhere for group in stats.groups)
        self.reached["copies failed"] += engine.num_failed > 0
        self.reached["attended in host memory"] += stats.kv_tokens_host > 0
        self.reached["guesses right"] += stats.accepted_draft_tokens_total > 0
        self.reached["guesses wrong"] += stats.draft_tokens_total > stats.accepted_draft_tokens_total
        if stats.tier is not None:
            self.reached.update(stats.tier.failures_total.keys())
            self.reached["late"] += stats.tier.loads_late_total > 0
        for pin in stats.pins:
            self.reached["pin lost"] += pin.is_lost
            self.reached["pinned"] += not pin.is_lost
            engine.ask(Unpin(next(self._calls), pin.pin_id))
        engine.ask(CacheCommand(next(self._calls), clear=True))
        for group in self._groups():
            assert group.used == group.cached == group.borrowed_used == group.borrowed_cached == 0
            assert group.host_used == group.host_cached == 0
        self._pins, self._aborted = [], set()

    def _groups(self) -> list[Any]:
        return self._engine.engine._scheduler.stats().groups


def adventurous_planner(rng: random.Random) -> type[LoadPlanner]:
    """Return a planner that decides at random, so that every division of a prompt is met: none may be wrong."""

    class Adventurous(LoadPlanner):
        def is_worth_loading(self, *args: Any) -> bool:
            return rng.random() < 0.8

        def num_to_compute(self, num_blocks: int, *args: Any) -> int | None:
            return rng.randint(1, num_blocks - 1) if num_blocks > 1 and rng.random() < 0.7 else None

    return Adventurous
