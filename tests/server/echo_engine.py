"""A peer for the gateway: speaks an engine's ZeroMQ protocol, but its "model" repeats the prompt, token after token.

It is no stand-in for the engine, whose own tests are elsewhere: it lets the gateway be tested, and its cost measured,
with answers that are known beforehand. Runs as a process of its own:

    python echo_engine.py REQUESTS_ADDRESS OUTPUTS_ADDRESS [--step-ms 0] [--max-model-len 4096]
                          [--name code --leases-address ADDRESS]
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import zmq
from echo_coordinator import EchoCoordinator

from swiftkv.engine.messages import (
    FINISH_LENGTH,
    FINISH_RUNNING,
    FINISH_STOP,
    NO_KV_CACHE,
    Abort,
    AddRequest,
    Admitted,
    AttachStorage,
    CacheCommand,
    CacheReport,
    DetachStorage,
    EngineStats,
    Explanation,
    Pin,
    PinPrompt,
    PinView,
    Ready,
    RequestError,
    Shutdown,
    Sleep,
    Slept,
    StepOutput,
    StepTrace,
    StorageChanged,
    ToEngine,
    TokenLogprobs,
    Unpin,
    Wake,
    Woken,
    pack_prompt_logprobs,
)
from swiftkv.lease.messages import LeasedBytes
from swiftkv.tier.messages import TierStats

BLOCK_SIZE = 16
VOCAB_SIZE = 1024
REFUSED_SALT = "refuse"  # a request with this cache_salt is answered by RequestError
STARVED_SALT = "starve"  # one with this, by one that says to come again


@dataclass
class Sequence:
    request: AddRequest
    prompt: list[int]
    position: int = 0


class EchoEngine:
    """Generates ``prompt[i % len(prompt)]`` as token ``i``; logprob of token ``t`` is ``-(t % 10) / 10``."""

    def __init__(self, requests_address: str, outputs_address: str, max_model_len: int, incarnation: int) -> None:
        context = zmq.Context.instance()
        self.pull = context.socket(zmq.PULL)
        self.push = context.socket(zmq.PUSH)
        self.pull.connect(requests_address)
        self.push.connect(outputs_address)
        self.decoder = msgspec.msgpack.Decoder(ToEngine)
        self.sequences: dict[int, Sequence] = {}
        self.admitted: list[Admitted] = []
        self.seen: list[tuple[str, list[int]]] = []
        self.taken = 0
        self.explanations: dict[int, Explanation] = {}
        self.incarnation = incarnation
        self.storage: str | None = None
        self.pins: list[PinView] = []
        self.step_time_s: list[float] = []
        self.send(Ready("echo", os.getpid(), max_model_len, VOCAB_SIZE, 1024, 1 << 20, BLOCK_SIZE, [], incarnation))

    def send(self, message: object) -> None:
        self.push.send(msgspec.msgpack.encode(message))

    def run(self, step_s: float) -> None:
        self.step_time_s = [0.0, 0.0, 0.0, 0.0, 0.0, step_s] if step_s else []
        next_step_s = time.perf_counter()
        while True:
            while self.pull.poll(None if not self.sequences else 0):
                self.taken += 1
                if not self.take(self.decoder.decode(self.pull.recv())):
                    return
            next_step_s = max(next_step_s + step_s, time.perf_counter())
            time.sleep(max(0.0, next_step_s - time.perf_counter()))
            if self.sequences:
                self.step()

    def take(self, message: ToEngine) -> bool:
        match message:
            case AddRequest(cache_salt=cache_salt) if cache_salt == REFUSED_SALT:
                self.send(RequestError(message.request_id, 400, "refused by the engine"))
            case AddRequest(cache_salt=cache_salt) if cache_salt == STARVED_SALT:
                self.send(RequestError(message.request_id, 503, "no more was lent", NO_KV_CACHE, 1800.0))
            case AddRequest(cache_salt=cache_salt):
                prompt = np.frombuffer(message.prompt, "<i4").tolist()
                self.sequences[message.request_id] = Sequence(message, prompt)
                cached = self.cached(cache_salt, prompt)
                self.admitted.append(Admitted(message.request_id, cached, {"host": BLOCK_SIZE} if cached else {}))
                found = (message.request_id, len(prompt), cached)
                self.explanations[message.request_id] = (
                    Explanation(*found, "evicted", 1.5) if cached else Explanation(*found, "never_stored")
                )
            case Abort():
                for request_id in message.request_ids:
                    self.sequences.pop(request_id, None)
                if not self.sequences:
                    self.send(StepOutput(b"", b"", b"", stats=self.stats(), messages_taken=self.taken))
            case AttachStorage(storage=storage):
                self.change_storage(message.change_id, None, storage.backend.get("backend", "file"))
            case DetachStorage():
                self.change_storage(message.change_id, "no storage is attached" if self.storage is None else None, None)
            case CacheCommand():
                known = [self.explanations[i] for i in message.explain if i in self.explanations]
                self.send(CacheReport(message.call, known, len(self.seen) if message.clear else 0))
                if message.clear:
                    self.seen.clear()
            case Pin(call=call, request_ids=[request_id, *_]):
                self.pin(call, self.explanations[request_id].prompt_tokens, message.ttl_s)
            case PinPrompt(call=call, prompt=prompt, cache_salt=cache_salt):
                token_ids = np.frombuffer(prompt, np.int32).tolist()
                self.pin(call, self.cached(cache_salt, token_ids), message.ttl_s)
            case Unpin(call=call, pin_id=pin_id):
                known = [pin for pin in self.pins if pin.pin_id == pin_id]
                self.pins = [pin for pin in self.pins if pin.pin_id != pin_id]
                self.send(StepOutput(b"", b"", b"", stats=self.stats(), messages_taken=self.taken))
                self.send(CacheReport(call, why_not=None if known else f"there is no pin {pin_id}"))
            case Sleep():
                self.send(Slept(self.incarnation))
            case Wake():
                self.send(Woken(self.incarnation))
            case Shutdown():
                return False
        return True

    def pin(self, call: int, num_tokens: int, ttl_s: float) -> None:
        """Keep a prompt of two blocks or more, and no second one."""
        num_tokens = num_tokens // BLOCK_SIZE * BLOCK_SIZE
        if num_tokens < 2 * BLOCK_SIZE or self.pins:
            self.send(CacheReport(call, why_not="there is no room"))
            return
        self.pins.append(PinView(1, num_tokens, time.monotonic() + ttl_s, is_lost=False))
        self.send(StepOutput(b"", b"", b"", stats=self.stats(), messages_taken=self.taken))
        self.send(CacheReport(call, pin=self.pins[0]))

    def change_storage(self, change_id: int, why_not: str | None, storage: str | None) -> None:
        """Say that storage was attached or detached; nothing is kept there."""
        self.storage = storage
        self.send(StepOutput(b"", b"", b"", stats=self.stats(), messages_taken=self.taken))
        self.send(StorageChanged(change_id, why_not))

    def cached(self, salt: str, prompt: list[int]) -> int:
        """Longest common prefix with an earlier prompt of that salt, in whole blocks, and never the whole prompt."""
        longest = 0
        for seen in [seen for other, seen in self.seen[-64:] if other == salt]:
            common = next((i for i, (a, b) in enumerate(zip(prompt, seen, strict=False)) if a != b), None)
            common = min(len(prompt), len(seen)) if common is None else common
            longest = max(longest, min(common, len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE)
        self.seen.append((salt, prompt))
        return longest

    def step(self) -> None:
        tokens, finishes = [], []
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[bytes]] = {}
        pooled: dict[int, bytes] = {}
        traces: list[StepTrace] = []
        began_ns = time.time_ns()
        generating: list[int] = []
        for request_id in list(self.sequences):
            sequence = self.sequences[request_id]
            sampling = sequence.request.sampling
            if sequence.request.is_traced and sequence.position == 0:
                leased = LeasedBytes(lent=len(sequence.prompt), borrowed=1)
                traces.append(StepTrace(request_id, began_ns, time.time_ns(), len(sequence.prompt), 0.001, leased))
            if sequence.request.pooling is not None:
                pooled[request_id] = echoed_numbers(sequence.prompt, sequence.request.pooling.token_ids).tobytes()
                del self.sequences[request_id]
                continue
            generating.append(request_id)
            token = sequence.prompt[sequence.position % len(sequence.prompt)]
            if sequence.position == 0 and sampling.prompt_logprobs is not None:
                entries = [token_logprobs(t, sampling.prompt_logprobs) for t in sequence.prompt[1:]]
                prompt_logprobs[request_id] = pack_prompt_logprobs(entries)
            sequence.position += 1
            finish = FINISH_RUNNING
            if token in sampling.stop_token_ids and sequence.position > sampling.min_tokens:
                finish = FINISH_STOP
            elif sequence.position == sampling.max_tokens:
                finish = FINISH_LENGTH
            if finish != FINISH_RUNNING:
                del self.sequences[request_id]
            if sampling.logprobs is not None:
                logprobs[request_id] = [token_logprobs(token, sampling.logprobs)]
            tokens.append(token)
            finishes.append(finish)
        self.send(
            StepOutput(
                np.array(generating, "<u8").tobytes(),
                np.array(tokens, "<i4").tobytes(),
                bytes(finishes),
                self.admitted,
                logprobs or None,
                prompt_logprobs or None,
                self.stats(),
                self.taken,
                pooled or None,
                traces or None,
                ended_s=time.perf_counter(),
            )
        )
        self.admitted = []

    def stats(self) -> EngineStats:
        used = len(self.sequences)
        tier = TierStats(backend=self.storage)
        return EngineStats(
            used,
            0,
            1024,
            1024 - used,
            used,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            step_time_s=self.step_time_s,
            tier=tier,
            pins=self.pins,
        )


def echoed_numbers(prompt: list[int], token_ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return what a pooled request gets: the "hidden state" of its prompt, or "logits" of `token_ids`."""
    if token_ids:
        return np.array([(token + prompt[-1] + len(prompt)) % 5 - 2 for token in token_ids], np.float32)
    return np.array([len(prompt), prompt[0], -prompt[-1], 1], np.float32)


def token_logprobs(token: int, k: int) -> TokenLogprobs:
    logprob = -(token % 10) / 10
    top = [(token + i) % VOCAB_SIZE for i in range(k)]
    return TokenLogprobs(logprob, 1, top, [logprob - i for i in range(k)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("requests_address")
    parser.add_argument("outputs_address")
    parser.add_argument("--step-ms", type=float, default=0.0)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--name", default="echo")
    parser.add_argument("--leases-address")
    arguments = parser.parse_args()
    if arguments.leases_address:
        EchoCoordinator(arguments.name, arguments.leases_address).start()
    addresses = (arguments.requests_address, arguments.outputs_address)
    engine = EchoEngine(*addresses, arguments.max_model_len, arguments.incarnation)
    engine.run(arguments.step_ms / 1000)


if __name__ == "__main__":
    main()
