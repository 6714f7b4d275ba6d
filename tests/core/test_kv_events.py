"""Events of the prefix index over real sockets: a subscriber that follows them knows what the core has."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import zmq
from lending_oracle import BorrowSetup, LendingSetup
from lending_storage_oracle import StoringEngine
from test_lending_random import Run, drawn_setup

from swiftkv import _core
from swiftkv.cache.geometry import KVGroup
from swiftkv.engine.kv_events import EventFormat, Taken, ZmqKVEvents, hash_of
from swiftkv.engine.messages import KVEventsSpec

KEY_BYTES = 32
TIMEOUT_MS = 60_000
END = (-1).to_bytes(8, "big", signed=True)
FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
Entry = tuple[int, int, str]  # hash, group, medium


class Follower:
    """Keeps an index of the blocks that events name."""

    def __init__(self) -> None:
        self.index: set[Entry] = set()
        self.prefixes: dict[int, list[int]] = {}  # all tokens up to the end of a block, by its hash

    def apply(self, event: dict[str, Any]) -> None:
        assert tuple(event) == ("type", *FIELDS[event["type"]])
        if event["type"] == "AllBlocksCleared":
            self.index.clear()
            return
        entries = {(name, event["group_idx"], event["medium"]) for name in event["block_hashes"]}
        assert len(entries) == len(event["block_hashes"])
        if event["type"] == "BlockRemoved":
            assert entries <= self.index
            self.index -= entries
            return
        assert not entries & self.index
        self.index |= entries
        if event["token_ids"]:
            self.check_tokens(event)

    def check_tokens(self, event: dict[str, Any]) -> None:
        parent, size = event["parent_block_hash"], event["block_size"]
        assert len(event["token_ids"]) == size * len(event["block_hashes"])
        prefix = [*([] if parent is None else self.prefixes[parent]), *event["token_ids"]]
        keys = _core.block_keys(b"", np.array(prefix, np.int32), size)
        hashes = [hash_of(keys[i : i + KEY_BYTES]) for i in range(0, len(keys), KEY_BYTES)]
        assert hashes[-len(event["block_hashes"]) :] == event["block_hashes"]
        for i, name in enumerate(hashes):
            self.prefixes[name] = prefix[: (i + 1) * size]


class Router(Follower):
    """Follows an engine as vLLM's subscribers do, in either encoding, and asks again for what it has missed."""

    def __init__(self, context: zmq.Context[Any], spec: KVEventsSpec) -> None:
        super().__init__()
        self.num_missed = 0
        self._next = 0
        self._live = context.socket(zmq.SUB)
        self._live.subscribe(spec.topic.encode())
        self._live.connect(spec.endpoint)
        self._again = context.socket(zmq.DEALER)
        assert spec.replay_endpoint is not None
        self._again.connect(spec.replay_endpoint)

    def hears(self) -> bool:
        """Whether something has come."""
        return bool(self._live.poll(10))

    def read(self, loses: bool = False) -> None:
        """Take the next batch, and those that were missed before it; or lose it."""
        assert self._live.poll(TIMEOUT_MS), "nothing comes"
        _, number, payload = self._live.recv_multipart()
        if loses:
            return
        if int.from_bytes(number, "big") > self._next:
            self.catch_up()
        self._take(number, payload)

    def catch_up(self) -> None:
        self.num_missed += 1
        self._again.send_multipart((b"", self._next.to_bytes(8, "big")))
        while True:
            assert self._again.poll(TIMEOUT_MS), "no answer"
            _, number, payload = self._again.recv_multipart()
            if number == END:
                return
            self._take(number, payload)

    def _take(self, number: bytes, payload: bytes) -> None:
        if int.from_bytes(number, "big") < self._next:
            return  # it came with the missed ones
        assert int.from_bytes(number, "big") == self._next
        self._next += 1
        time_s, events, rank = msgspec.msgpack.decode(payload)
        assert time_s > 0
        assert rank == 0
        for event in events:
            self.apply(event if isinstance(event, dict) else as_map(event))


def as_map(event: list[Any]) -> dict[str, Any]:
    kind, *values = event
    values += [None] * (len(FIELDS[kind]) - len(values))
    return {"type": kind, **dict(zip(FIELDS[kind], values, strict=True))}


def groups_of(setup: LendingSetup) -> list[KVGroup]:
    """Return groups of which only the kind matters here."""
    return [KVGroup((0,), 1, 8, "float32", 16, "window" if window else "full", window) for _, _, window in setup.groups]


def format_of(setup: LendingSetup) -> EventFormat:
    return EventFormat(groups_of(setup), "CPU", setup.block_size)


def resident(scheduler: _core.Scheduler) -> set[Entry]:
    keys, groups, places = scheduler.resident_blocks()
    hashes = [hash_of(keys[i : i + KEY_BYTES]) for i in range(0, len(keys), KEY_BYTES)]
    media = [("CPU", "PEER", "HOST")[place] for place in places.tolist()]
    return set(zip(hashes, groups.tolist(), media, strict=True))


class TellingEngine(StoringEngine):
    """Tells subscribers after every event."""

    publisher: ZmqKVEvents | None = None

    def check(self) -> None:
        super().check()
        if self.publisher is not None:
            self.publisher.collect()


class TellingRun(Run):
    """Random traffic in which extents come and go."""

    engine: TellingEngine

    def _engine(self) -> TellingEngine:
        while True:
            setup = drawn_setup(self.rng)
            if setup.enable_prefix_caching:
                try:
                    return TellingEngine(setup, self.rng)
                except ValueError:
                    continue


@contextmanager
def telling(
    engine: TellingEngine, directory: Path, encoding: Literal["map", "array"] = "map", **options: int
) -> Iterator[tuple[zmq.Context[Any], KVEventsSpec]]:
    """Have an engine tell those who subscribe what it has."""
    context = zmq.Context()
    spec = KVEventsSpec(f"ipc://{directory}/e", f"ipc://{directory}/r", topic="kv@a@b", encoding=encoding, **options)
    engine.publisher = ZmqKVEvents(spec, engine.scheduler, format_of(engine.setup), context)
    try:
        yield context, spec
    finally:
        engine.publisher.close()
        context.destroy(linger=0)


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e")


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("seed", range(10))
def test_an_index_that_is_rebuilt_from_events_is_that_of_the_core(
    directory: Path, seed: int, encoding: Literal["map", "array"]
) -> None:
    """The subscriber comes late, and asks for everything from the start."""
    run = TellingRun(seed)
    with telling(run.engine, directory, encoding) as (context, spec):
        run.go()
        router = Router(context, spec)
        router.catch_up()
        assert router.index == resident(run.engine.scheduler)


BORROWS = LendingSetup(((3, 8, 0),), (BorrowSetup(0, 4, 2),))


def converse(engine: TellingEngine, request_id: int) -> None:
    """Compute something that nobody has asked for before."""
    rng = random.Random(request_id)
    engine.add(request_id, [rng.randrange(1000) for _ in range(rng.randint(9, 40))], 3)
    while engine.schedule():
        engine.commit()
        engine.check()


def test_batches_that_were_missed_are_sent_again(directory: Path) -> None:
    engine = TellingEngine(BORROWS, random.Random(0))
    engine.borrow(0, 4)
    with telling(engine, directory) as (context, spec):
        router = Router(context, spec)
        request_ids = iter(range(10_000))
        while not router.hears():  # its subscription takes a moment to arrive
            converse(engine, next(request_ids))
        router.read()
        assert router.num_missed <= 1  # what came before the subscription
        for loses in (False, True, True, False, False):
            converse(engine, next(request_ids))
            router.read(loses)
        router.catch_up()
        assert router.num_missed >= 2
        assert router.index == resident(engine.scheduler)
        assert {medium for _, _, medium in router.index} == {"CPU", "PEER"}


def test_who_asks_for_nonsense_is_not_answered(directory: Path) -> None:
    engine = TellingEngine(BORROWS, random.Random(0))
    with telling(engine, directory) as (context, spec):
        stranger = context.socket(zmq.DEALER)
        assert spec.replay_endpoint is not None
        stranger.connect(spec.replay_endpoint)
        for frames in ([b""], [b"", b"1"], [b"", b"", b"", b""], [b"x" * 100]):
            stranger.send_multipart(frames)
        converse(engine, 1)
        router = Router(context, spec)
        router.catch_up()
        assert router.index == resident(engine.scheduler)


def test_events_beyond_the_bound_become_one_that_forgets_all() -> None:
    """A subscriber then knows less than there is, and nothing that is not there."""
    engine = TellingEngine(BORROWS, random.Random(0))
    engine.scheduler.enable_kv_events(3)
    converse(engine, 1)
    converse(engine, 2)
    taken = Taken(*engine.scheduler.take_kv_events())
    assert len(taken.kinds) <= 3
    events = list(format_of(BORROWS).events_of(taken))
    assert events[0] == {"type": "AllBlocksCleared"}
    known: set[Entry] = set()
    for event in events[1:]:
        entries = {(name, event["group_idx"], event["medium"]) for name in event["block_hashes"]}
        known = known | entries if event["type"] == "BlockStored" else known - entries
    assert known <= resident(engine.scheduler)
    with pytest.raises(ValueError, match="max_events"):
        engine.scheduler.enable_kv_events(0)


def test_a_cache_that_forgets_everything_says_so_in_one_event() -> None:
    engine = TellingEngine(BORROWS, random.Random(0))
    engine.scheduler.enable_kv_events(1000)
    converse(engine, 1)
    engine.reset_prefix_cache()
    taken = Taken(*engine.scheduler.take_kv_events())
    assert list(format_of(BORROWS).events_of(taken)) == [{"type": "AllBlocksCleared"}]


def test_blocks_that_come_from_storage_are_told_with_their_tokens() -> None:
    engine = TellingEngine(BORROWS, random.Random(0))
    engine.scheduler.enable_kv_events(1000)
    prompt = list(range(17))
    engine.add(1, prompt, 2)
    while engine.schedule():
        engine.commit()
        engine.store()
    engine.reset_prefix_cache()
    engine.scheduler.take_kv_events()
    engine.add_held(2, prompt, 2)
    transfer = engine.begin_load(2)
    assert transfer is not None
    assert not len(engine.scheduler.take_kv_events()[0])  # they are not there yet
    engine.read(transfer, 3)
    engine.read(transfer, 1, is_loaded=False)
    (event,) = format_of(BORROWS).events_of(Taken(*engine.scheduler.take_kv_events()))
    assert event["token_ids"] == prompt[:12]
    assert event["parent_block_hash"] is None
    assert len(event["block_hashes"]) == 3
    engine.drain()


def test_a_salt_is_told_with_the_first_block_of_a_prompt() -> None:
    scheduler = _core.Scheduler(
        [_core.GroupSpec(1, 16, 0)], block_size=4, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=32
    )
    scheduler.enable_kv_events(100)
    event_format = format_of(LendingSetup(((1, 16, 0),), ()))
    event_format.add_namespace(b"a tenant")
    for request_id, namespace in enumerate((b"a tenant", b"")):
        scheduler.add_request(
            request_id,
            np.arange(9, dtype=np.int32),
            max_tokens=1,
            min_tokens=0,
            stop_token_ids=np.zeros(0, np.int32),
            namespace=namespace,
            skip_prefix_match=False,
        )
    assert scheduler.schedule() is not None
    scheduler.commit(np.array([1, 1], np.int32))
    events = list(event_format.events_of(Taken(*scheduler.take_kv_events())))
    assert [event["extra_keys"] for event in events] == [[["a tenant"], None], [None, None]]
    assert [event["token_ids"] for event in events] == [list(range(8))] * 2
