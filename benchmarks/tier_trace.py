"""Loop a trace in virtual time over storage with faults, and check invariants every virtual hour:

    python benchmarks/tier_trace.py --trace conversation.jsonl --loops 24 --out benchmarks/out/tier_trace.json

The scheduler, the tier with its threads, envelope, breaker and `fault` over the `file` backend are real; a stub
replaces the model. It writes the KV that belongs to a block's tokens, and checks all KV that a request begins with or
continues from. Steps take virtual time, so that an hour of the trace (a loop of Mooncake's) passes in a minute; storage
takes real time, which passes on both clocks. Each loop has a salt of its own, so the next one finds nothing of it.

Each hour it notes the memory of the process, and checks the scheduler's invariants, that the backend is within its
bound, and that its index has exactly the objects in its directory. The first violation ends the program.
"""

from __future__ import annotations

import tempfile
import threading
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from lending_node import parser, say, table, write_report

from swiftkv import _core
from swiftkv.bench.traces import BLOCK_TOKENS, Arrival, read_trace
from swiftkv.cache.geometry import KVGroup
from swiftkv.engine.tier import OpenStorage, StorageTier
from swiftkv.storage.file_index import FileIndex
from swiftkv.storage.levels import Level, Levels
from swiftkv.storage.registry import open_backend
from swiftkv.storage_options import parse_storage
from swiftkv.tier.keys import ObjectKeys
from swiftkv.tier.messages import TierSpec
from swiftkv.tier.reach import HostReach
from swiftkv.tier.writer import queue_memory

HOUR_S = 3600.0
_MAX_MODEL_LEN = 1 << 18
_MAX_NUM_SEQS = 64
_MAX_BATCHED_TOKENS = 16384
_LONGEST_WAIT_S = 0.05
_STALL_S = 120.0
_NO_STOP = np.array([], np.int32)
GROUP = KVGroup((0,), num_kv_heads=1, head_dim=2, dtype="float32", block_size=BLOCK_TOKENS)
FAULTS = {
    "fail": 0.002,
    "flip": 0.005,
    "truncate": 0.005,
    "delay": 0.01,
    "delay_time": "20ms",
    "hang": 0.0002,
    "hang_time": "2s",
}


@dataclass
class Prompt:
    """A request in the engine, and the keys of all blocks that it will have."""

    keys: npt.NDArray[np.uint8]  # [blocks, 32]
    num_checked: int = 0  # blocks whose KV was compared


@dataclass
class Hour:
    """The state at the end of a virtual hour."""

    requests: int
    computed_tokens: int
    local_hit_tokens: int
    storage_hit_tokens: int
    num_met: int
    loads: int
    loads_late: int
    loads_declined: int
    stored_blocks: int
    dropped_stores: int
    failures: dict[str, int]
    objects: int
    stored_bytes: int
    rss_bytes: int
    wall_s: float


class StubEngine:
    """An engine whose model fills each block with the block's key."""

    def __init__(self, args: Namespace, directory: Path) -> None:
        self._token_s = args.token_time
        self._file = {"backend": "file", "path": str(directory), "size": args.size, "min_free": 0, "fsync": "none"}
        options = parse_storage(
            {"backend": "fault", "inner": self._file, "seed": args.seed, **FAULTS}, "storage", directory
        )
        keys = ObjectKeys([GROUP], "stub", "stub")
        levels = Levels([Level("storage", open_backend(options, keys.fingerprint))])
        spec = TierSpec(None, str(directory), prefetch_threshold=BLOCK_TOKENS, write_policy=args.write_policy)
        self.pool = np.zeros((args.blocks, GROUP.block_bytes), np.uint8)
        reach = HostReach([torch.from_numpy(self.pool.reshape(-1))])
        self.scheduler = _core.Scheduler(
            [_core.GroupSpec(1, args.blocks, 0, GROUP.block_bytes)],
            block_size=BLOCK_TOKENS,
            max_num_seqs=_MAX_NUM_SEQS,
            max_num_batched_tokens=_MAX_BATCHED_TOKENS,
            max_model_len=_MAX_MODEL_LEN,
            enable_prefix_caching=True,
            enable_chunked_prefill=True,
        )
        self._woken = threading.Event()
        self.levels = levels
        self.tier = StorageTier(
            OpenStorage(spec, "fault", levels, keys, reach, queue_memory(reach, spec.queue_bytes, GROUP.block_bytes)),
            self.scheduler,
            self._woken.set,
            groups=[GROUP],
            lender_pools=lambda _: None,
            max_num_seqs=_MAX_NUM_SEQS,
        )
        self.now_s = 0.0
        self.prompts: dict[int, Prompt] = {}
        self.num_ended = 0
        self.computed_tokens = 0
        self.num_met = 0
        self._progress_s = time.monotonic()

    def add(self, request_id: int, arrival: Arrival, salt: bytes) -> None:
        prompt = arrival.prompt()
        answer = np.full(arrival.output_tokens, (1 << 30) + request_id, np.int32)
        keys = _core.block_keys(salt, np.concatenate([prompt, answer]), BLOCK_TOKENS)
        self.prompts[request_id] = Prompt(np.frombuffer(keys, np.uint8).reshape(-1, 32))
        self.scheduler.add_request(
            request_id,
            prompt,
            max_tokens=arrival.output_tokens,
            min_tokens=0,
            stop_token_ids=_NO_STOP,
            namespace=salt,
            skip_prefix_match=False,
            priority=0,
            arrival_s=self.now_s,
        )
        self.tier.added(request_id)

    def step(self) -> None:
        """Do one step, or wait a moment for storage."""
        self._woken.clear()
        self.tier.before_step()
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            began_s = time.monotonic()
            self._woken.wait(_LONGEST_WAIT_S)
            self.now_s += time.monotonic() - began_s
            if began_s > self._progress_s + _STALL_S:
                raise SystemExit("nothing has happened for two minutes, although requests wait")
            return
        self._progress_s = time.monotonic()
        for request_id, cached in zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True):
            self.tier.admitted(request_id, cached)
        for request_id, (first, end) in zip(plan.met_request_ids.tolist(), plan.met_blocks.tolist(), strict=True):
            self.tier.met(request_id, first, end)
            self.num_met += 1
        for request_id in plan.preempted_request_ids.tolist():
            self.prompts[request_id].num_checked = 0
        self._run(plan)
        duration_s = 1e-4 + self._token_s * len(plan.token_ids)
        self.now_s += duration_s
        ids = plan.request_ids[plan.logits_seqs].astype(np.int64)
        result = self.scheduler.commit((ids + (1 << 30)).astype(np.int32), duration_s)
        for request_id in ids[result.finish_reasons != 0].tolist():
            self.tier.forget(request_id)
            del self.prompts[request_id]
            self.num_ended += 1

    def _run(self, plan: _core.StepPlan) -> None:
        """Check the KV that rows find in the cache, and write the KV that they compute."""
        self.computed_tokens += len(plan.token_ids)
        num_tokens = np.diff(plan.query_starts)
        entries, starts = plan.stream_tables[0][0], plan.table_starts[0]
        for s, (request_id, end) in enumerate(zip(plan.request_ids.tolist(), plan.context_lens.tolist(), strict=True)):
            prompt = self.prompts[request_id]
            blocks = entries[starts[s] : starts[s + 1]]
            first = (end - int(num_tokens[s])) // BLOCK_TOKENS
            self._check(prompt, blocks, first)
            full = min(len(blocks), len(prompt.keys))  # the last block of an answer has no key before it is full
            for i in range(first, full):
                self.pool[blocks[i]] = np.tile(prompt.keys[i], GROUP.block_bytes // 32)
            prompt.num_checked = max(first, end // BLOCK_TOKENS)

    def _check(self, prompt: Prompt, blocks: npt.NDArray[np.int32], first: int) -> None:
        """Compare the blocks that were found since the last step with their keys."""
        found = slice(prompt.num_checked, first)
        if found.start >= found.stop:
            return
        expected = np.tile(prompt.keys[found], GROUP.block_bytes // 32)
        if not np.array_equal(self.pool[blocks[found]], expected):
            raise SystemExit("a request reads KV of other tokens than its own")

    def settle(self) -> None:
        """Wait until nothing is on its way up or down."""
        deadline_s = time.monotonic() + _STALL_S
        while (stats := self.tier.stats()).num_to_store or stats.num_loading or self.tier.is_reading:
            if time.monotonic() > deadline_s:
                raise SystemExit("storage does not become idle")
            self.tier.before_step()
            time.sleep(0.002)

    def hour(self, directory: Path, began_s: float) -> Hour:
        """Check the invariants, and return the state."""
        self.settle()
        self.scheduler.check_invariants()
        stats, group = self.tier.stats(), self.scheduler.stats().groups[0]
        if group.free + group.used + group.cached + group.loading != group.total:
            raise SystemExit("the pool equation does not hold")
        objects = check_directory(directory)
        usage = self.levels.levels[0].backend.usage()
        assert usage is not None
        assert usage.bound_bytes is not None
        if usage.objects != len(objects):
            raise SystemExit(f"the index has {usage.objects} objects, but the directory {len(objects)}")
        if usage.num_bytes > usage.bound_bytes:
            raise SystemExit(f"storage has {usage.num_bytes} bytes, but may have {usage.bound_bytes}")
        hits = self.scheduler.stats().prefix_hit_tokens_total
        return Hour(
            requests=self.num_ended,
            computed_tokens=self.computed_tokens,
            local_hit_tokens=hits - stats.hit_tokens_total,
            storage_hit_tokens=stats.hit_tokens_total,
            num_met=self.num_met,
            loads=stats.loads_total,
            loads_late=stats.loads_late_total,
            loads_declined=stats.loads_declined_total,
            stored_blocks=stats.stored_blocks_total,
            dropped_stores=stats.dropped_stores_total,
            failures=stats.failures_total,
            objects=usage.objects,
            stored_bytes=usage.num_bytes,
            rss_bytes=resident_bytes(),
            wall_s=time.monotonic() - began_s,
        )


def check_directory(directory: Path) -> set[bytes]:
    """Return the keys of the objects that lie in a directory, which must be those of its index."""
    lying = {bytes.fromhex(file.name) for file in directory.glob("objects/*/*")}
    index = FileIndex(directory / "index.sqlite")
    try:
        known = index.known(sorted(lying))
    finally:
        index.close()
    if missing := len(lying - set(known)):
        raise SystemExit(f"{missing} objects of the directory are not in its index")
    return lying


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def looped(trace: Sequence[Arrival], loops: int, max_output: int) -> Iterator[tuple[Arrival, int]]:
    """Yield the requests of all loops, each an hour later, with their loop's number and their answers cut short."""
    for loop in range(loops):
        for arrival in trace:
            output_tokens = max(1, min(arrival.output_tokens, max_output))
            yield replace(arrival, time_s=arrival.time_s + loop * HOUR_S, output_tokens=output_tokens), loop


def serve(engine: StubEngine, args: Namespace, directory: Path) -> Iterator[Hour]:
    """Serve the trace, and yield the state after each virtual hour."""
    waiting = deque(enumerate(looped(read_trace(args.trace)[: args.requests], args.loops, args.max_output)))
    began_s, hours = time.monotonic(), 0
    while waiting or engine.prompts:
        while waiting and waiting[0][1][0].time_s <= engine.now_s:
            request_id, (arrival, loop) = waiting.popleft()
            engine.add(request_id, arrival, b"loop %d" % loop)
        if engine.scheduler.has_work():
            engine.step()
            continue
        next_s = waiting[0][1][0].time_s if waiting else engine.now_s
        if next_s >= (hours + 1) * HOUR_S:
            hours += 1
            yield engine.hour(directory, began_s)
        engine.now_s = max(engine.now_s, next_s)
    yield engine.hour(directory, began_s)


def slope(hours: Sequence[Hour]) -> float:
    """Return by how many bytes the memory grows in an hour, by least squares, after the first two hours."""
    rss = [hour.rss_bytes for hour in hours[2:]]
    return float(np.polyfit(np.arange(len(rss)), rss, 1)[0]) if len(rss) > 1 else 0.0


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--trace", type=Path, required=True, help="JSON lines in Mooncake's form")
    options.add_argument("--requests", type=int, help="requests to take from the start of the trace; default: all")
    options.add_argument("--loops", type=int, default=24, help="how often the trace is replayed")
    options.add_argument("--max-output", type=int, default=8, help="the most tokens of an answer")
    options.add_argument("--blocks", type=int, default=2048, help="blocks of the pool, of 512 tokens each")
    options.add_argument("--size", default="128MiB", help="size of the storage")
    options.add_argument("--token-time", type=float, default=2e-6, help="virtual seconds to compute a token")
    options.add_argument("--write-policy", default="write_through")
    options.add_argument("--storage", type=Path, default=Path("/dev/shm"), help="directory for the files")
    args = options.parse_args()
    hours = []
    with tempfile.TemporaryDirectory(dir=args.storage, prefix="tier-") as temporary:
        directory = Path(temporary) / "kv"
        engine = StubEngine(args, directory)
        try:
            for hour in serve(engine, args, directory):
                hours.append(hour)
                say(f"hour {len(hours)}: {hour}")
        finally:
            engine.tier.close()
    say(
        table(
            ["hour", "requests", "from storage", "from the pool", "met", "failed", "objects", "MB", "RSS, MB"],
            rows(hours),
        )
    )
    say(f"memory grows by {slope(hours) / 1e3:.0f} kB an hour")
    write_report(args, hours=[vars(hour) for hour in hours])


def rows(hours: Sequence[Hour]) -> list[list[str]]:
    return [
        [
            str(i),
            str(hour.requests),
            f"{hour.storage_hit_tokens / 1e6:.1f} M",
            f"{hour.local_hit_tokens / 1e6:.1f} M",
            str(hour.num_met),
            str(sum(hour.failures.values())),
            str(hour.objects),
            f"{hour.stored_bytes / 1e6:.0f}",
            f"{hour.rss_bytes / 1e6:.1f}",
        ]
        for i, hour in enumerate(hours, 1)
    ]


if __name__ == "__main__":
    main()
