"""An engine that borrows and lends, simulated to the byte: every plan is carried out, layer by layer, copy by copy.

A layer block is a list of marks, one per token; the mark of a token's KV names the KV group, its layer and everything
up to that token. Memory that nobody may count on is emptied: between steps where blocks are staged, and extents that
went home. A step may read a block only where the marks of that very request lie, and write only where it may. Steps are
carried out as late as they may be, when they are committed: whatever has been lent, freed or recalled since must not
matter.

It is one file, for it is one model: who checks a rule of it should find all rules beside it.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from kv_oracle import KEY_BYTES, Prefixes
from visits import State, Visits, states_of

from swiftkv import _core

DROPPED, REJECTED = 4, 6
LOCAL = 0  # the place of a block in the engine's own pool
WIDTH_BYTES = 64  # of a layer block; any number does
PEER_BASE_BYTES = 10_000
LOCAL_BASE_BYTES = 1_000
HOST_BASE_BYTES = 5_000

Marks = list[tuple[int, int, int] | None]  # the number of a prefix, the KV group, its layer


@dataclass(frozen=True)
class BorrowSetup:
    group: int
    num_extents: int
    blocks_per_extent: int
    waste_bytes: int = 0


@dataclass(frozen=True)
class LendingSetup:
    groups: tuple[tuple[int, int, int], ...]  # (num_layers, num_blocks, window)
    borrow: tuple[BorrowSetup, ...]
    lend: tuple[tuple[int, int, int], ...] = ()  # (group, num_extents, blocks_per_extent)
    block_size: int = 4
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    max_model_len: int = 48
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    stream_buffers: int = 2
    retention_interval: int | None = None
    blocks_per_extent: tuple[int, ...] = ()  # of each group, where they share extents; links lend in the first's name
    sources: tuple[int, ...] = ()  # the groups whose blocks steps copy from chunks of host memory, all of one size
    num_chunks: int = 0

    def block_bytes(self, group: int) -> int:
        return self.groups[group][0] * WIDTH_BYTES

    def extent_bytes(self, link: BorrowSetup) -> int:
        return link.blocks_per_extent * self.block_bytes(link.group) + link.waste_bytes

    def base_bytes(self, group: int) -> int:
        return self._bases_bytes[group]

    @cached_property
    def _bases_bytes(self) -> list[int]:
        if self.blocks_per_extent:
            return [LOCAL_BASE_BYTES] * len(self.groups)
        sizes = (num_blocks * self.block_bytes(group) for group, (_, num_blocks, _) in enumerate(self.groups))
        return list(itertools.accumulate(sizes, initial=LOCAL_BASE_BYTES))

    def _spec(self, group: int) -> _core.GroupSpec:
        size = self.blocks_per_extent[group] if self.blocks_per_extent else 0
        num_chunks = self.num_chunks if group in self.sources else 0
        return _core.GroupSpec(
            *self.groups[group],
            WIDTH_BYTES,
            self.base_bytes(group),
            size,
            source_offset_bytes=HOST_BASE_BYTES,
            num_source_chunks=num_chunks,
        )

    @property
    def num_extents(self) -> int:
        """The extents that groups share."""
        return self.groups[0][1] // self.blocks_per_extent[0]

    @cached_property
    def extents_for_windows(self) -> int:
        """The extents that the windows of one sequence need, in which nothing is staged."""
        whole, total = -(-self.max_model_len // self.block_size), 0
        for (_, _, window), size in zip(self.groups, self.blocks_per_extent, strict=True):
            held = min(whole, -(-(window - 1) // self.block_size) + 2) if self.enable_chunked_prefill else whole
            total += -(-held // size) + (size > 1) if window else 0
        return total

    def scheduler(self) -> _core.Scheduler:
        return _core.Scheduler(
            [self._spec(g) for g in range(len(self.groups))],
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            lend_links=[_core.Link(*link) for link in self.lend],
            borrow_links=[
                _core.Link(b.group, b.num_extents, b.blocks_per_extent, self.extent_bytes(b), PEER_BASE_BYTES)
                for b in self.borrow
            ],
            stream_buffers=self.stream_buffers,
            retention_interval=self.retention_interval,
        )


@dataclass
class SimulatedRequest:
    tokens: list[int]
    last_len: int
    prompt_len: int
    draft: list[int] = field(default_factory=list)


def sampled_behind(tokens: list[int]) -> int:
    return (sum(tokens) * 7 + len(tokens)) % 3


@dataclass
class Planned:
    """A step in progress."""

    plan: _core.StepPlan
    number: int
    drafts: dict[int, list[int]]  # by request id, of the rows that sample
    void: set[int] = field(default_factory=set)  # requests that were dropped since


@dataclass(frozen=True)
class Row:
    """One sequence of a step in one KV group."""

    request_id: int
    begin: int  # of its new positions
    end: int
    prefix: list[int] | None  # a number for each position; None: computed in vain, and written all the same
    tables: list[list[int]]  # for each buffer of the layer stream

    def entries(self, layer: int) -> list[int]:
        return self.tables[layer % len(self.tables)]


@dataclass
class LendingEngine:
    setup: LendingSetup
    rng: random.Random
    scheduler: _core.Scheduler = field(init=False)
    planned: list[Planned] = field(default_factory=list)  # in progress, the oldest first; at most two
    num_planned: int = 0
    last_tokens: dict[int, int] = field(default_factory=dict)  # by slot
    requests: dict[int, SimulatedRequest] = field(default_factory=dict)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    misread: dict[int, str] = field(default_factory=dict)  # requests that cannot go on, and why
    prefixes: Prefixes = field(default_factory=Prefixes)
    now_s: float = 0.0
    streamed_blocks: int = 0
    moved_blocks: int = 0
    visits: Visits = field(default_factory=Visits)

    def __post_init__(self) -> None:
        self.scheduler = self.setup.scheduler()
        self.local: dict[int, Marks] = {}  # by offset in the pool
        self.peers: list[dict[int, Marks]] = [{} for _ in self.setup.borrow]  # by offset in the lender's pool
        self.held: list[set[int]] = [set() for _ in self.setup.borrow]
        self.recalled: list[set[int]] = [set() for _ in self.setup.borrow]
        self.lent: list[set[int]] = [set() for _ in self.setup.lend]
        # Extents of dead lenders that steps in progress may still reach, with the last such step: the bytes are gone.
        self.orphaned: list[dict[int, int]] = [{} for _ in self.setup.borrow]
        self.pins: dict[int, bytes] = {}  # the keys that each keeps
        self.num_pins = 0
        # Layers of several groups come in any order: this picks the group whose next event comes.
        self.next_group: Callable[[list[Iterator[None]]], Iterator[None]] = random.Random(0).choice

    def _note(self, event: str) -> None:
        self.visits.note(states_of(self), event)

    # ---- requests ----

    def add(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int,
        *,
        skip_prefix_match: bool = False,
        priority: int = 0,
    ) -> None:
        self._note("add")
        empty = np.zeros(0, np.int32)
        self.scheduler.add_request(
            request_id,
            np.array(prompt, np.int32),
            max_tokens=max_tokens,
            min_tokens=0,
            stop_token_ids=empty,
            namespace=b"",
            skip_prefix_match=skip_prefix_match,
            priority=priority,
        )
        last_len = min(len(prompt) + max_tokens, self.setup.max_model_len)
        self.requests[request_id] = SimulatedRequest(list(prompt), last_len, len(prompt))

    def abort(self, request_id: int) -> None:
        self._note("abort")
        self.scheduler.abort(np.array([request_id], np.uint64))
        self.requests.pop(request_id, None)

    def set_draft(self, request_id: int, num_right: int, wrong: list[int]) -> None:
        """Guess `num_right` tokens as they will be sampled, and then `wrong`."""
        request = self.requests[request_id]
        tokens = list(request.tokens)
        for _ in range(num_right):
            tokens.append(sampled_behind(tokens))
        request.draft = tokens[len(request.tokens) :] + wrong
        self.scheduler.set_draft(request_id, np.array(request.draft, np.int32))

    # ---- extents ----

    def borrow(self, link: int, count: int) -> None:
        known = self.held[link] | self.recalled[link] | set(self.orphaned[link])
        extents = sorted(set(range(self.setup.borrow[link].num_extents)) - known)[:count]
        if extents:
            self._note("borrow")
        self.held[link].update(extents)
        self.scheduler.borrow(link, np.array(extents, np.int32))

    def recall(self, link: int, count: int) -> None:
        extents = self.rng.sample(sorted(self.held[link]), min(count, len(self.held[link])))
        if extents:
            self._note("recall")
        self.held[link].difference_update(extents)
        self.recalled[link].update(extents)
        self.scheduler.recall(link, np.array(extents, np.int32))

    def take_returned(self) -> None:
        states = states_of(self)
        for link in range(len(self.setup.borrow)):
            for extent in self.scheduler.take_returned(link).tolist():
                self.visits.note(states, "returned")
                self.recalled[link].remove(extent)
                self._empty_extent(link, extent)

    def _empty_extent(self, link: int, extent: int) -> None:
        extent_bytes = self.setup.extent_bytes(self.setup.borrow[link])
        first = PEER_BASE_BYTES + extent * extent_bytes
        for offset in [o for o in self.peers[link] if first <= o < first + extent_bytes]:
            del self.peers[link][offset]

    def lose(self, link: int) -> None:
        if self.held[link] or self.recalled[link]:
            self._note("lose")
        self.scheduler.lose(link)
        for extent in self.held[link] | self.recalled[link]:
            self._empty_extent(link, extent)
            if self.planned:
                self.orphaned[link][extent] = self.planned[-1].number
        self.held[link].clear()
        self.recalled[link].clear()
        self._note_lost_pins()

    def pin(self, tokens: list[int], max_share: float) -> int | None:
        """Pin what lies in the local pool of a prefix, and return its number; `None` if it is not kept."""
        pin_id, self.num_pins = self.num_pins, self.num_pins + 1
        keys = _core.block_keys(b"", np.array(tokens, np.int32), self.setup.block_size)
        length, share, is_kept = self.scheduler.pin(pin_id, keys, max_share)
        assert is_kept == (length > 0 and share <= max_share)
        if not is_kept:
            return None
        self.pins[pin_id] = keys[: length * KEY_BYTES]
        return pin_id

    def unpin(self, pin_id: int) -> None:
        assert self.scheduler.unpin(pin_id) == (self.pins.pop(pin_id, None) is not None)

    def _note_lost_pins(self) -> None:
        for pin_id in self.scheduler.take_lost_pins().tolist():
            del self.pins[pin_id]

    def lend(self, link: int, count: int) -> None:
        group, _, blocks_per_extent = self.setup.lend[link]
        states = states_of(self)
        extents = self.scheduler.lend(link, count).tolist()
        if extents:
            self.visits.note(states, "lend")
        assert len(extents) <= count
        assert not self.lent[link] & set(extents)
        self.lent[link].update(extents)
        for extent in extents:
            for block in range(extent * blocks_per_extent, (extent + 1) * blocks_per_extent):
                self._empty_block(group, block)

    def take_back(self, link: int, count: int) -> None:
        extents = self.rng.sample(sorted(self.lent[link]), min(count, len(self.lent[link])))
        if extents:
            self._note("take back")
        self.lent[link].difference_update(extents)
        self.scheduler.take_back(link, np.array(extents, np.int32))

    def _empty_block(self, group: int, block: int) -> None:
        first = self.setup.base_bytes(group) + block * self.setup.block_bytes(group)
        for layer in range(self.setup.groups[group][0]):
            self.local.pop(first + layer * WIDTH_BYTES, None)

    # ---- steps ----

    def schedule(self) -> bool:
        self.now_s += 1
        states, extents = states_of(self), self.extents()
        plan = self.scheduler.schedule(self.now_s)
        self._note_plan(states, plan)
        self._note_hand_overs(states, extents)
        self._note_lost_pins()
        if plan is None:
            assert self.scheduler.schedule(self.now_s) is None, "there was something to do, had one asked twice"
            return False
        assert set(plan.preempted_request_ids.tolist()) <= set(self.requests), "a request that is gone"
        for request_id in plan.preempted_request_ids.tolist():
            self.misread.pop(request_id, None)
        self.num_planned += 1
        samples = Counter(plan.request_ids[plan.logits_seqs].tolist())
        drafts = {i: self.requests[i].draft[: count - 1] for i, count in samples.items()}
        self.planned.append(Planned(plan, self.num_planned, drafts))
        return True

    def _note_plan(self, states: list[State], plan: _core.StepPlan | None) -> None:
        if plan is None:
            self.visits.note(states, "nothing to do")
            return
        tokens = np.diff(plan.query_starts)
        happened = {
            "copies alone": not len(plan.request_ids),
            "prefill": bool((tokens > 1).any()),
            "decode": bool((tokens == 1).any()),
            "preempt": len(plan.preempted_request_ids) > 0,
            "stream": plan.num_stream_buffers > 0,
        }
        self.visits.note(states, *(event for event, is_true in happened.items() if is_true))
        for group, state in enumerate(states):
            if len(plan.copies(group, "spill", 0)):
                self.visits.note([state], "spill")

    def extents(self) -> list[int]:
        """Return how many of the extents that groups share each has."""
        groups = self.scheduler.stats().groups
        return [(g.total - g.elsewhere) // size for g, size in zip(groups, self.setup.blocks_per_extent, strict=False)]

    def _note_hand_overs(self, states: list[State], before: list[int]) -> None:
        changes = [now - then for now, then in zip(self.extents(), before, strict=True)]
        for state, change in zip(states, changes, strict=False):
            if change > 0 > min(changes):
                self.visits.note([state], "hand over")

    def step_ahead(self) -> bool:
        """The next step is planned before the one in progress is committed. False: there was nothing to do."""
        planned = self.schedule()
        if len(self.planned) > planned:
            self.commit()
        return bool(self.planned)

    def commit(self) -> None:
        """Carry out the oldest step in progress, whatever has happened since it was planned, and commit it."""
        self._note("commit")
        step = self.planned[0]
        plan = step.plan
        self._check_tokens(step)
        self._move(plan)
        running = [self._run(step, group) for group in range(len(self.setup.groups))]
        while running:
            group = self.next_group(running)
            if next(group, self) is self:
                running.remove(group)
        ids = plan.request_ids[plan.logits_seqs].tolist()
        sampled = [token for request_id in dict.fromkeys(ids) for token in self._sample(step, request_id)]
        self.last_tokens.update(zip(plan.row_slots[plan.logits_seqs].tolist(), sampled, strict=True))
        result = self.scheduler.commit(np.array(sampled, np.int32))
        self._end_step()
        for request_id, token, reason in zip(ids, sampled, result.finish_reasons.tolist(), strict=True):
            if reason == REJECTED:
                continue
            if reason == DROPPED:
                for later in self.planned:
                    later.void.add(request_id)
            elif request_id in self.requests:
                assert request_id not in self.misread, self.misread[request_id]
                self._append(request_id, token, reason)

    def _check_tokens(self, step: Planned) -> None:
        starts, token_ids = step.plan.query_starts.tolist(), step.plan.token_ids.tolist()
        for s, request_id in enumerate(step.plan.request_ids.tolist()):
            end = int(step.plan.context_lens[s])
            tokens = [self.last_tokens[~t] if t < 0 else t for t in token_ids[starts[s] : starts[s + 1]]]
            if self._counts(step, request_id):
                assert tokens == self._tokens(step, request_id)[end - len(tokens) : end]

    def _tokens(self, step: Planned, request_id: int) -> list[int]:
        return self.requests[request_id].tokens + step.drafts.get(request_id, [])

    def _counts(self, step: Planned, request_id: int) -> bool:
        return request_id in self.requests and request_id not in step.void

    def abandon(self) -> None:
        """A copy fails somewhere in the last step that was planned."""
        while len(self.planned) > 1:
            self.commit()
        self._note("abandon")
        self._move(self.planned[0].plan, is_done=False)
        for group in range(len(self.setup.groups)):
            events = list(range(6 * self.setup.groups[group][0]))
            stop_at = self.rng.choice(events)
            for event, _ in enumerate(self._run(self.planned[0], group, is_checked=False)):
                if event == stop_at:
                    break
        self.scheduler.abandon()
        self._note_lost_pins()
        self._end_step()

    def _end_step(self) -> None:
        number = self.planned.pop(0).number
        for link, orphaned in enumerate(self.orphaned):
            for extent in [extent for extent, last in orphaned.items() if last <= number]:
                del orphaned[extent]
                self._empty_extent(link, extent)

    def _sample(self, step: Planned, request_id: int) -> list[int]:
        """Return a token behind the request's last one, and behind each of its draft."""
        draft = step.drafts[request_id]
        if request_id not in self.requests:
            return [0] * (len(draft) + 1)
        return [sampled_behind(self.requests[request_id].tokens + draft[:i]) for i in range(len(draft) + 1)]

    def _append(self, request_id: int, token: int, reason: int) -> None:
        request = self.requests[request_id]
        request.tokens.append(token)
        request.draft = []
        assert (reason != 0) == (len(request.tokens) == request.last_len)
        if reason:
            self.outputs[request_id] = request.tokens[request.prompt_len :]
            del self.requests[request_id]

    def _run(self, step: Planned, group: int, is_checked: bool = True) -> Iterator[None]:
        """Carry out a step in the order that the layer stream promises; with two buffers loads run one layer ahead."""
        plan = step.plan
        num_layers = self.setup.groups[group][0]
        num_buffers = max(1, plan.num_stream_buffers)
        ahead = num_buffers - 1
        if plan.num_stream_buffers:
            self._spoil_staged(plan, group)
        rows = self._rows(step, group)
        loaded = 0
        for layer in range(num_layers):
            while loaded < min(num_layers, layer + 1 + ahead):
                self._spill(plan, group, loaded)
                yield
                self._load(plan, group, loaded)
                loaded += 1
                yield
            self._write(rows, group, layer)
            yield
            if is_checked:
                self._read(rows, group, layer)
            yield
            self._store(plan, group, layer)
            yield

    def _move(self, plan: _core.StepPlan, is_done: bool = True) -> None:
        """Move blocks within the pool, before any layer; if that is not done, nobody knows what lies at either end."""
        for group, block, place in plan.local_moves.tolist():
            block_bytes = self.setup.block_bytes(group)
            for layer in range(self.setup.groups[group][0]):
                source, target = (
                    self.setup.base_bytes(group) + b * block_bytes + layer * WIDTH_BYTES for b in (block, place)
                )
                marks = self.local.pop(source, [])
                self.local[target] = marks if is_done else []

    def _buffer(self, plan: _core.StepPlan, layer: int) -> int:
        return layer % max(1, plan.num_stream_buffers)

    def _spoil_staged(self, plan: _core.StepPlan, group: int) -> None:
        for tables in plan.stream_tables:
            for entry in tables[group].tolist():
                if entry < 0 and entry != _core.NO_BLOCK:
                    self.local.pop(self.setup.base_bytes(group) + ~entry * WIDTH_BYTES, None)

    def _layer_blocks(self, group: int, runs: np.ndarray, layer: int) -> Iterator[tuple[int, int, int]]:
        """(link, peer offset, local offset) of every layer block of the runs."""
        block_bytes = self.setup.block_bytes(group)
        for link, peer, local, count, staged in runs.tolist():
            assert count > 0
            for i in range(count):
                ours = local + (i * WIDTH_BYTES if staged else i * block_bytes + layer * WIDTH_BYTES)
                yield link, peer + i * block_bytes + layer * WIDTH_BYTES, ours

    def _may_reach(self, group: int, link: int, peer: int) -> None:
        borrowed = self.setup.borrow[link]
        assert borrowed.group == group
        extent, offset = divmod(peer - PEER_BASE_BYTES, self.setup.extent_bytes(borrowed))
        reachable = self.held[link] | self.recalled[link] | set(self.orphaned[link])
        assert extent in reachable, "an extent that is not ours"
        assert offset + WIDTH_BYTES <= borrowed.blocks_per_extent * self.setup.block_bytes(group)

    def _to_peer(self, group: int, runs: np.ndarray, layer: int) -> None:
        for link, peer, local in self._layer_blocks(group, runs, layer):
            assert link < len(self.setup.borrow), "a step writes to host memory"
            self._may_reach(group, link, peer)
            self.peers[link][peer] = list(self.local.get(local, []))

    def _spill(self, plan: _core.StepPlan, group: int, layer: int) -> None:
        self._to_peer(group, plan.copies(group, "spill", 0), layer)
        self.moved_blocks += len(plan.copies(group, "spill", 0))

    def _store(self, plan: _core.StepPlan, group: int, layer: int) -> None:
        self._to_peer(group, plan.copies(group, "store", self._buffer(plan, layer)), layer)

    def _load(self, plan: _core.StepPlan, group: int, layer: int) -> None:
        runs = plan.copies(group, "load", self._buffer(plan, layer))
        for link, peer, local in self._layer_blocks(group, runs, layer):
            self.local[local] = self._bytes_of_peer(group, link, peer)
            self.streamed_blocks += 1

    def _bytes_of_peer(self, group: int, link: int, peer: int) -> Marks:
        self._may_reach(group, link, peer)
        return list(self.peers[link].get(peer, []))

    def _rows(self, step: Planned, group: int) -> list[Row]:
        plan = step.plan
        starts, context_lens = plan.query_starts.tolist(), plan.context_lens.tolist()
        buffers = plan.stream_tables[: max(1, plan.num_stream_buffers)]
        tables, table_starts = [tables[group].tolist() for tables in buffers], plan.table_starts[group].tolist()
        rows = []
        for s, request_id in enumerate(plan.request_ids.tolist()):
            end, counts = context_lens[s], self._counts(step, request_id)
            prefix = self.prefixes.of(b"", self._tokens(step, request_id)[:end]) if counts else None
            begin = end - (starts[s + 1] - starts[s])
            row_tables = [table[table_starts[s] : table_starts[s + 1]] for table in tables]
            rows.append(Row(request_id, begin, end, prefix, row_tables))
        return rows

    def _addresses(self, group: int, entries: list[int], layer: int) -> list[int]:
        """Return where the layer blocks of entries of a block table lie."""
        assert _core.NO_BLOCK not in entries
        num_layers, num_blocks, _ = self.setup.groups[group]
        indices = [~entry if entry < 0 else entry + layer for entry in entries]
        assert all(0 <= index < num_layers * num_blocks for index in indices)
        for link, (lent_group, _, blocks_per_extent) in enumerate(self.setup.lend):
            if lent_group == group or self.setup.blocks_per_extent:
                in_extent = self.setup.groups[lent_group][0] * blocks_per_extent
                assert self.lent[link].isdisjoint(index // in_extent for index in indices), "a lent block is in use"
        base_bytes = self.setup.base_bytes(group)
        return [base_bytes + index * WIDTH_BYTES for index in indices]

    def _write(self, rows: list[Row], group: int, layer: int) -> None:
        size = self.setup.block_size
        written = set()
        for row in rows:
            first_block = row.begin // size
            addresses = self._addresses(group, row.entries(layer)[first_block : -(-row.end // size)], layer)
            for position in range(row.begin, row.end):
                address = addresses[position // size - first_block]
                assert (address, position % size) not in written, "two requests write to one place"
                written.add((address, position % size))
                marks = self.local.setdefault(address, [])
                marks.extend([None] * (size - len(marks)))
                number = -1 if row.prefix is None else row.prefix[position]
                marks[position % size] = (number, group, layer)

    def _read(self, rows: list[Row], group: int, layer: int) -> None:
        size, window = self.setup.block_size, self.setup.groups[group][2]
        for row in rows:
            if row.prefix is None:
                continue
            first = max(0, row.begin - window + 1) if window else 0
            first_block = first // size
            addresses = self._addresses(group, row.entries(layer)[first_block : -(-row.end // size)], layer)
            for position in range(first, row.end):
                marks = self.local.get(addresses[position // size - first_block], [])
                if len(marks) != size or marks[position % size] != (row.prefix[position], group, layer):
                    self.misread[row.request_id] = f"layer {layer}: not the bytes of position {position}"

    def reset_prefix_cache(self) -> None:
        self._note("reset")
        self.scheduler.reset_prefix_cache()

    # ---- checks ----

    def check(self) -> None:
        self.scheduler.check_invariants()
        for g, stats in enumerate(self.scheduler.stats().groups):
            local = stats.free + stats.used + stats.cached + stats.lent + stats.in_flight + stats.staging
            assert local + stats.loading + stats.elsewhere == stats.total == self.setup.groups[g][1]
            assert stats.elsewhere == 0 or self.setup.blocks_per_extent
            lent = sum(len(self.lent[i]) * link[2] for i, link in enumerate(self.setup.lend) if link[0] == g)
            assert stats.lent == lent
            held = sum(
                len(self.held[i]) * link.blocks_per_extent
                for i, link in enumerate(self.setup.borrow)
                if link.group == g
            )
            borrowed = stats.borrowed_free + stats.borrowed_used + stats.borrowed_cached + stats.borrowed_in_flight
            assert borrowed >= held
            if not any(self.recalled) and not any(self.orphaned):
                assert borrowed == held
            if not self.planned:
                assert stats.in_flight == stats.borrowed_in_flight == 0
            assert stats.pinned <= stats.used
            assert self.pins or stats.pinned == 0
        self._check_pins()

    def _check_pins(self) -> None:
        """Check that all that is pinned lies in the local pool, whatever requests and peers wanted since."""
        if all(window for _, _, window in self.setup.groups):
            return
        keys, _, places = self.scheduler.resident_blocks()
        local = {keys[i * KEY_BYTES :][:KEY_BYTES] for i, place in enumerate(places.tolist()) if place == LOCAL}
        for pinned in self.pins.values():
            assert {pinned[i : i + KEY_BYTES] for i in range(0, len(pinned), KEY_BYTES)} <= local

    def drain(self) -> None:
        """Run until every request for which there can be room has finished; nothing that could run waits."""
        while self.planned:
            self.commit()
        steps = 0
        while self.scheduler.has_work():
            if self.schedule():
                self.commit()
                self.take_returned()
                self.check()
                steps += 1
                assert steps < 2_000, "no end"
                continue
            stuck = self.scheduler.starved(self.now_s + 1, 0.5)
            assert stuck or not self.scheduler.has_work(), "work, but nothing can run"
            for request_id in stuck:
                self.abort(request_id)
        assert not self.requests
        self.take_returned()
        assert not any(self.recalled), "a recalled extent is still held by an engine at rest"
