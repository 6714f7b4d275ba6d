"""Time the C++ scheduler alone: `python benchmarks/scheduler.py`. Prints medians and the spread of the runs.

Arguments name the parts to run: `python benchmarks/scheduler.py forecast`.

- step: schedule() + commit() with 64 running sequences of 2,000 tokens, without and with reading the plan's arrays
- wait: a request ends and the next of 100,000 is admitted, by each policy
- write_back: take_offers() after each such step, beside a pool full of cached blocks
- match: add_request() + schedule() of a prompt of 128K tokens that a tree of 10^6 blocks holds
- forecast: the gateway's forecast for a request that arrives while 1,000 wait and 64 are answered, by each policy
"""

from __future__ import annotations

import argparse
import time
from typing import get_args

import numpy as np

from swiftkv import _core
from swiftkv.policies import SchedulingPolicy
from swiftkv.server.forecast import EngineForecast, ForecastLimits, NewPrompt

PARTS = ["step", "write_back", "wait", "forecast", "match"]
BLOCK_SIZE = 16
NO_STOP = np.array([], np.int32)


def percentiles(times_s: list[float]) -> str:
    low, median, high = np.percentile(np.array(times_s) * 1e6, [10, 50, 90])
    return f"median {median:8.1f} us   (10 % {low:8.1f}, 90 % {high:8.1f}, {len(times_s)} runs)"


def read_plan(plan: _core.StepPlan) -> int:
    arrays: list[np.ndarray] = [
        plan.token_ids,
        plan.positions,
        plan.query_starts,
        plan.context_lens,
        plan.request_ids,
        plan.row_slots,
    ]
    arrays += [*plan.stream_tables[0], *plan.table_starts, plan.logits_rows, plan.logits_seqs]
    arrays += [plan.new_request_ids, plan.new_cached_tokens, plan.preempted_request_ids]
    return sum(a.size for a in arrays)


def bench_step(num_seqs: int = 64, length: int = 2000, steps: int = 400) -> None:
    scheduler = _core.Scheduler(
        [_core.GroupSpec(28, num_seqs * (length + steps + 64) // BLOCK_SIZE)],
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs * length,
        max_model_len=length + steps + 64,
    )
    rng = np.random.default_rng(0)
    for i in range(num_seqs):
        prompt = rng.integers(0, 150_000, length, dtype=np.int32)
        scheduler.add_request(i, prompt, steps + 16, 0, NO_STOP, b"model", False)
    sampled = rng.integers(0, 150_000, num_seqs, dtype=np.int32)
    scheduler.schedule()
    scheduler.commit(sampled)

    schedule_s, read_s, commit_s = [], [], []
    for _ in range(steps):
        start = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        assert plan is not None
        read_plan(plan)
        read = time.perf_counter()
        scheduler.commit(sampled)
        commit_s.append(time.perf_counter() - read)
        read_s.append(read - scheduled)
        schedule_s.append(scheduled - start)
    print(f"step, {num_seqs} sequences of {length} tokens")
    print("  schedule + commit        ", percentiles([a + b for a, b in zip(schedule_s, commit_s, strict=True)]))
    print("  schedule                 ", percentiles(schedule_s))
    print("  commit                   ", percentiles(commit_s))
    print("  reading the plan's arrays", percentiles(read_s))


def bench_match(num_blocks: int = 1_000_000, length: int = 131_072, runs: int = 60) -> None:
    max_model_len = length + 64
    blocks_per_prompt = length // BLOCK_SIZE
    scheduler = _core.Scheduler(
        [_core.GroupSpec(1, num_blocks + blocks_per_prompt)],
        block_size=BLOCK_SIZE,
        max_num_seqs=16,
        max_num_batched_tokens=16 * max_model_len,
        max_model_len=max_model_len,
    )
    rng = np.random.default_rng(0)
    num_prompts = num_blocks // blocks_per_prompt
    prompts = [rng.integers(0, 150_000, length, dtype=np.int32) for _ in range(num_prompts)]
    for i, prompt in enumerate(prompts):
        scheduler.add_request(i, prompt, 1, 0, NO_STOP, b"model", False)
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
    cached = scheduler.stats().groups[0].cached

    add_s, schedule_s, commit_s = [], [], []
    for run in range(runs):
        prompt = np.append(prompts[rng.integers(num_prompts)], np.int32(1))
        start = time.perf_counter()
        scheduler.add_request(1_000_000 + run, prompt, 1, 0, NO_STOP, b"model", False)
        added = time.perf_counter()
        plan = scheduler.schedule()
        scheduled = time.perf_counter()
        scheduler.commit(np.zeros(1, np.int32))
        commit_s.append(time.perf_counter() - scheduled)
        schedule_s.append(scheduled - added)
        add_s.append(added - start)
        assert plan is not None
        assert plan.new_cached_tokens.tolist() == [length]
    print(f"match, {length} tokens in a tree of {cached} blocks")
    print("  add + schedule           ", percentiles([a + b for a, b in zip(add_s, schedule_s, strict=True)]))
    print("  add_request (keys)       ", percentiles(add_s))
    print("  schedule (match, plan)   ", percentiles(schedule_s))
    print("  commit (release)         ", percentiles(commit_s))


def bench_wait(policy: SchedulingPolicy, num_waiting: int = 100_000, num_seqs: int = 64, steps: int = 400) -> None:
    scheduler = _core.Scheduler(
        [_core.GroupSpec(1, 65_536)],
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        scheduling_policy=policy,
    )
    rng = np.random.default_rng(0)
    add_s = []
    for i in range(num_waiting):
        prompt = rng.integers(0, 150_000, int(rng.lognormal(5, 1)) % 4000 + 1, dtype=np.int32)
        start = time.perf_counter()
        scheduler.add_request(i, prompt, 1_000_000, 0, NO_STOP, b"model", False, arrival_s=i * 1e-3)
        add_s.append(time.perf_counter() - start)
    now_s = num_waiting * 1e-3
    admit_s: list[float] = []
    decode_s: list[float] = []
    for step in range(steps):
        now_s += 0.05
        start = time.perf_counter()
        plan = scheduler.schedule(now_s)
        (admit_s if step % 2 == 0 else decode_s).append(time.perf_counter() - start)
        assert plan is not None
        scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))
        if step % 2:
            scheduler.abort(plan.request_ids[:1])
    print(f"wait, {num_waiting} requests, {policy}")
    print("  add_request              ", percentiles(add_s))
    print("  schedule, one is admitted", percentiles(admit_s[1:]))
    print("  schedule, nobody is      ", percentiles(decode_s))


def bench_write_back(num_blocks: int, num_seqs: int = 64, length: int = 2000, steps: int = 400) -> None:
    """Decode, with a prompt now and then that evicts blocks, and write back the blocks that are evicted next."""
    scheduler = _core.Scheduler(
        [_core.GroupSpec(1, num_blocks)],
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs + 1,
        max_num_batched_tokens=num_seqs * length,
        max_model_len=16_384,
    )
    rng = np.random.default_rng(0)
    next_id = 0

    def add(num_tokens: int, max_tokens: int) -> None:
        nonlocal next_id
        prompt = rng.integers(0, 150_000, num_tokens, dtype=np.int32)
        scheduler.add_request(next_id, prompt, max_tokens, 0, NO_STOP, b"model", False)
        next_id += 1

    def step() -> None:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(np.zeros(len(plan.logits_rows), np.int32))

    for _ in range(num_blocks * BLOCK_SIZE // 16_000 + 1):
        add(16_000, 1)
    while scheduler.has_work():
        step()
    for _ in range(num_seqs):
        add(length, steps + 16)
    step()
    scheduler.set_write_policy("write_back")
    while len(scheduler.take_offers(1024)[1]):
        scheduler.end_copying()
    scheduler.end_copying()

    take_s, num_taken = [], 0
    for i in range(steps):
        if i % 8 == 0:
            add(1000, 1)
        step()
        start = time.perf_counter()
        _, groups, _, _ = scheduler.take_offers(64)
        scheduler.end_copying()
        take_s.append(time.perf_counter() - start)
        num_taken += len(groups)
    cached = scheduler.stats().groups[0].cached
    print(f"write_back, {cached} cached blocks, {num_taken} taken in {steps} steps")
    print("  take_offers              ", percentiles(take_s))


def bench_forecast(policy: SchedulingPolicy, num_waiting: int = 1000, num_answers: int = 64, runs: int = 2000) -> None:
    forecast = EngineForecast(ForecastLimits(policy, step_limit_s=0.25))
    forecast.learn([1.27e-3, 2.5e-7, 2.5e-7, 0.0, 0.0, 0.0225])
    rng = np.random.default_rng(0)

    def prompt() -> NewPrompt:
        return NewPrompt(int(rng.lognormal(6.3, 0.9)) % 8000 + 1, due_s=10.0)

    for i in range(num_answers + 1000):  # the first have a token or are gone, so that there are errors to allow for
        found = forecast.of(prompt(), 0.01 * i)
        assert found is not None
        forecast.add(i, prompt(), 0.01 * i, found.ttft_s)
        forecast.token(i, 0.01 * i + 0.005)
        if i >= num_answers:
            forecast.end(i, 0.01 * i + 0.006)
    for i in range(num_waiting):
        forecast.add(10_000 + i, prompt(), 20.0 + 0.01 * i)
    forecast.admitted(10_000, 0, 30.0)
    forecast_s = []
    for i in range(runs):
        arrives = prompt()
        start = time.process_time()
        forecast.of(arrives, 31.0 + 0.001 * i)
        forecast_s.append(time.process_time() - start)
    print(f"forecast, {num_waiting} requests wait, {policy}")
    print("  of                       ", percentiles(forecast_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parts = parser.parse_args().parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if "step" in parts:
        bench_step()
    if "write_back" in parts:
        for num_blocks in (100_000, 1_000_000):
            bench_write_back(num_blocks)
    for policy in get_args(SchedulingPolicy):
        if "wait" in parts:
            bench_wait(policy)
        if "forecast" in parts:
            bench_forecast(policy)
    if "match" in parts:
        bench_match()


if __name__ == "__main__":
    main()
