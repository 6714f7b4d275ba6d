"""A simulated engine around `_core.Scheduler` that knows, for every slot of every block, which bytes lie there.

The bytes of a token's KV are a function of the namespace and of all tokens up to it. `Prefixes` gives each such prefix
a number; the number stands for the bytes. A step may read a block only where it holds the numbers of that very request.

It is one file, for it is one model: who checks a rule of it should find all rules beside it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from naive_scheduler import NaivePlan, NaiveScheduler, Setup

from swiftkv import _core

RUNNING, STOP, LENGTH, ABORTED, DROPPED, BROKEN, REJECTED = range(7)

KEY_BYTES = 32
PEER = -1  # in place of a KV group: who borrows writes there

Cell = tuple[int, int, int]  # a place for the KV of a token, or for a part of it
Bytes = tuple[int, int]  # the KV group, and the number of a prefix


class Prefixes:
    """Numbers every (namespace, tokens so far) differently: a trie of dicts, no hashing that could collide."""

    def __init__(self) -> None:
        self._ids: dict[tuple[object, object], int] = {}

    def _id(self, parent: object, item: object) -> int:
        return self._ids.setdefault((parent, item), len(self._ids))

    def of(self, namespace: bytes, tokens: list[int]) -> list[int]:
        """Return one number per token."""
        ids, parent = [], self._id(None, namespace)
        for token in tokens:
            parent = self._id(parent, token)
            ids.append(parent)
        return ids


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    min_tokens: int
    stop: list[int]
    namespace: bytes
    skip_prefix_match: bool
    priority: int
    tokens: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    computed: int | None = None  # None: waiting
    cached: int = 0  # at first admission
    was_admitted: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]


@dataclass
class Finished:
    outputs: list[int]
    reason: int
    cached: int


@dataclass
class Load:
    """A block on its way up, with the numbers of its tokens."""

    blocks: list[int]  # per group
    prefix: tuple[object, ...]
    numbers: list[int]


@dataclass
class Row:
    """One sequence of a plan."""

    request_id: int
    slot: int
    begin: int
    end: int
    tables: list[list[int]]  # per group


def sampled_behind(tokens: list[int]) -> int:
    return (sum(tokens) + len(tokens)) % 3


def rows_of(plan: _core.StepPlan) -> list[Row]:
    rows = []
    for s, request_id in enumerate(plan.request_ids.tolist()):
        first, last = plan.query_starts[s : s + 2].tolist()
        end = int(plan.context_lens[s])
        tables = [
            table[starts[s] : starts[s + 1]].tolist()
            for table, starts in zip(plan.stream_tables[0], plan.table_starts, strict=True)
        ]
        rows.append(Row(request_id, int(plan.row_slots[s]), end - (last - first), end, tables))
    return rows


class Engine:
    """schedule → run → commit, where run is bookkeeping. Asserts everything that can be seen from outside.

    Up to two steps are planned before the first of them runs: as late as it may, when it is committed.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.scheduler = setup.scheduler()
        self.naive = NaiveScheduler(setup)
        self.predicted_by = [] if setup.blocks_per_extent else [self.naive]
        self.prefixes = Prefixes()
        self.requests: dict[int, Request] = {}
        self.finished: dict[int, Finished] = {}
        self.bytes: dict[Cell, Bytes] = {}
        self.num_moves = 0
        self.computed_tokens: list[int] = []  # of each step
        self.plans: list[_core.StepPlan] = []  # in progress, the oldest first
        self.drafts: list[dict[int, list[int]]] = []  # of each of them, what its rows end with, by request id
        self.last_tokens: dict[int, int] = {}  # by slot
        self.slots: dict[int, int] = {}
        self.loads: dict[int, Load] = {}
        self.num_loads = 0
        self.away: set[int] = set()  # extents of the pool in which a peer writes
        self.lent: list[set[int]] = [set() for _ in setup.lend]  # extents of links
        self.now_s = 0.0
        self.pins: dict[int, bytes] = {}  # the keys that each keeps
        self.num_pins = 0

    def add(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        min_tokens: int = 0,
        stop: list[int] | None = None,
        namespace: bytes = b"",
        skip_prefix_match: bool = False,
        priority: int = 0,
        deadline_s: float = math.inf,
        flow: int = 0,
        flow_weight: float = 1.0,
    ) -> None:
        self.scheduler.add_request(
            request_id,
            np.array(prompt, np.int32),
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=np.array(stop or [], np.int32),
            namespace=namespace,
            skip_prefix_match=skip_prefix_match,
            priority=priority,
            arrival_s=self.now_s,
            deadline_s=deadline_s,
            flow=flow,
            flow_weight=flow_weight,
        )
        for naive in self.predicted_by:
            naive.add(
                request_id,
                prompt,
                max_tokens,
                min_tokens,
                stop or [],
                namespace,
                skip_prefix_match,
                priority,
                self.now_s,
                deadline_s,
                flow,
                flow_weight,
            )
        self.requests[request_id] = Request(
            prompt, max_tokens, min_tokens, stop or [], namespace, skip_prefix_match, priority
        )

    def abort(self, *request_ids: int) -> None:
        self.scheduler.abort(np.array(request_ids, np.uint64))
        for request_id in request_ids:
            for naive in self.predicted_by:
                naive.abort(request_id)
            self.requests.pop(request_id, None)
            self.slots.pop(request_id, None)

    def set_draft(self, request_id: int, num_right: int, wrong: list[int]) -> None:
        """Guess `num_right` tokens as they will be sampled, and then `wrong`."""
        request = self.requests[request_id]
        tokens = list(request.tokens)
        for _ in range(num_right):
            tokens.append(sampled_behind(tokens))
        draft = tokens[len(request.tokens) :] + wrong
        self.scheduler.set_draft(request_id, np.array(draft, np.int32))
        for naive in self.predicted_by:
            naive.set_draft(request_id, draft)
        request.draft = draft

    def begin_loading(self, namespace: bytes, tokens: list[int]) -> None:
        """`tokens` end with the block that is loaded."""
        size = self.setup.block_size
        key = _core.block_keys(namespace, np.array(tokens, np.int32), size)[-32:]
        blocks = self.scheduler.begin_loading(key).tolist()
        load, prefix = self.num_loads, (namespace, *tokens)
        for naive in self.predicted_by:
            assert bool(blocks) == naive.begin_loading(load, prefix)
        if blocks:
            self.loads[load] = Load(blocks, prefix, self.prefixes.of(namespace, tokens)[-size:])
            self.num_loads += 1

    def end_loading(self, load: int, is_loaded: bool) -> None:
        ended = self.loads.pop(load)
        for g, block in enumerate(ended.blocks):
            self.fill(g, block, ended.numbers if is_loaded else [-1] * self.setup.block_size)
        self.scheduler.end_loading(np.array(ended.blocks, np.int32), is_loaded)
        for naive in self.predicted_by:
            naive.end_loading(load, ended.prefix, is_loaded)

    def pin(self, namespace: bytes, tokens: list[int], max_share: float) -> int | None:
        """Pin what is here of a prefix, and return its number; `None` if it is not kept."""
        pin_id, self.num_pins = self.num_pins, self.num_pins + 1
        keys = _core.block_keys(namespace, np.array(tokens, np.int32), self.setup.block_size)
        length, share, is_kept = self.scheduler.pin(pin_id, keys, max_share)
        assert is_kept == (length > 0 and share <= max_share)
        for naive in self.predicted_by:
            assert (length, is_kept) == naive.pin(pin_id, namespace, tokens, max_share)
        if is_kept:
            self.pins[pin_id] = keys[: length * KEY_BYTES]
        return pin_id if is_kept else None

    def unpin(self, pin_id: int) -> None:
        is_known = self.scheduler.unpin(pin_id)
        assert is_known == (self.pins.pop(pin_id, None) is not None)
        for naive in self.predicted_by:
            assert is_known == naive.unpin(pin_id)

    def _note_lost_pins(self) -> None:
        lost = self.scheduler.take_lost_pins().tolist()
        for pin_id in lost:
            del self.pins[pin_id]
        for naive in self.predicted_by:
            assert lost == naive.lost_pins
            naive.lost_pins = []

    def write_back(self) -> None:
        """Offer blocks to storage when they are evicted next."""
        self.scheduler.set_write_policy("write_back")
        for naive in self.predicted_by:
            naive.writes_back = True

    def take_offers(self, max_blocks: int) -> list[tuple[int, bytes]]:
        """Return the groups and keys of blocks that storage gets."""
        keys, groups, _, _ = self.scheduler.take_offers(max_blocks)
        self.scheduler.end_copying()
        taken = [(group, keys[i * KEY_BYTES : (i + 1) * KEY_BYTES]) for i, group in enumerate(groups.tolist())]
        for naive in self.predicted_by:
            assert taken == [(group, self._key(prefix)) for group, prefix in naive.take_offers(max_blocks)]
        return taken

    def _key(self, prefix: tuple[object, ...]) -> bytes:
        namespace, *tokens = prefix
        assert isinstance(namespace, bytes)
        return _core.block_keys(namespace, np.array(tokens, np.int32), self.setup.block_size)[-KEY_BYTES:]

    def schedule(self) -> _core.StepPlan | None:
        plan = self.scheduler.schedule(self.now_s)
        for naive in self.predicted_by:
            self._compare(plan, naive.schedule(self.now_s))
        self._note_lost_pins()
        if plan is not None:
            rows = rows_of(plan)
            self._note_admissions(plan)
            self._check_budget(rows)
            for row in rows:
                self._check_progress(self.requests[row.request_id], row)
            samples = Counter(plan.request_ids[plan.logits_seqs].tolist())
            self.plans.append(plan)
            self.drafts.append({i: self.requests[i].draft[: count - 1] for i, count in samples.items()})
        return plan

    def _compare(self, plan: _core.StepPlan | None, expected: NaivePlan) -> None:
        assert (plan is None) == (not expected.rows)
        if plan is not None:
            assert [(r.request_id, r.begin, r.end - r.begin) for r in rows_of(plan)] == expected.rows
            new = zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True)
            assert list(new) == expected.new
            assert plan.preempted_request_ids.tolist() == expected.preempted

    def block_at(self, group: int, entry: int) -> int:
        """Return the block to which an entry of a block table points."""
        num_layers, num_blocks, _ = self.setup.groups[group]
        assert entry >= 0
        assert entry % num_layers == 0
        assert entry // num_layers < num_blocks
        return entry // num_layers

    def cells(self, group: int, block: int, offset: int) -> list[Cell]:
        """Return where a token's KV lies: a large block takes as many cells of an extent as small ones do."""
        if not self.setup.blocks_per_extent:
            return [(group, block, offset)]
        size = self.setup.blocks_per_extent[group]
        num_cells = self._num_cells // size
        extent, within = divmod(block, size)
        assert extent not in self.away, "a block lies in an extent that is lent"
        return [(extent, within * num_cells + i, offset) for i in range(num_cells)]

    def lend(self, link: int, max_extents: int) -> list[int]:
        """Lend extents of a pool that groups share, in which a peer writes at once."""
        extents = self.scheduler.lend(link, max_extents).tolist()
        assert len(extents) <= max_extents
        shared = self._shared(link, extents)
        assert len(shared) == len(extents) * self.setup.lend[link][1]
        assert not self.away & shared, "an extent is lent twice"
        self.away |= shared
        self.lent[link].update(extents)
        for cell in itertools.product(shared, range(self._num_cells), range(self.setup.block_size)):
            self.bytes[cell] = (PEER, -1)
        return extents

    def take_back(self, link: int, extents: Sequence[int]) -> None:
        self.scheduler.take_back(link, np.array(extents, np.int32))
        self.lent[link].difference_update(extents)
        self.away -= self._shared(link, extents)

    def take_all_back(self) -> None:
        for link, extents in enumerate(self.lent):
            self.take_back(link, sorted(extents))

    def _shared(self, link: int, extents: Sequence[int]) -> set[int]:
        size = self.setup.lend[link][1]
        return {extent * size + i for extent in extents for i in range(size)}

    @property
    def _num_cells(self) -> int:
        """The cells of an extent, for each token of a block."""
        return math.lcm(*self.setup.blocks_per_extent)

    def fill(self, group: int, block: int, numbers: Sequence[int]) -> None:
        """Write a whole block; -1 stands for bytes that nobody may read."""
        for offset, number in enumerate(numbers):
            self.bytes.update(dict.fromkeys(self.cells(group, block, offset), (group, number)))

    def numbers(self, group: int, block: int) -> list[int]:
        """Return what lies in a whole block, which its group has written."""
        numbers = []
        for offset in range(self.setup.block_size):
            [(owner, number)] = {self.bytes[cell] for cell in self.cells(group, block, offset)}
            assert owner == group
            numbers.append(number)
        return numbers

    def _move(self, plan: _core.StepPlan) -> None:
        for group, block, place in plan.local_moves.tolist():
            self.num_moves += 1
            for offset in range(self.setup.block_size):
                cells = zip(self.cells(group, block, offset), self.cells(group, place, offset), strict=True)
                for source, target in cells:
                    # Whoever reads a block where it was is found out, also before somebody else writes there.
                    self.bytes[target] = self.bytes.pop(source, (group, -1))

    def _note_admissions(self, plan: _core.StepPlan) -> None:
        for request_id in plan.preempted_request_ids.tolist():
            self.requests[request_id].computed = None
            del self.slots[request_id]
        for request_id, cached in zip(plan.new_request_ids.tolist(), plan.new_cached_tokens.tolist(), strict=True):
            request = self.requests[request_id]
            assert not request.was_admitted
            assert cached % self.setup.block_size == 0
            assert cached < len(request.prompt)
            request.was_admitted = True
            request.cached = cached

    def abandon(self) -> None:
        """The only step in progress fails: nobody may read what its moves were to write, nor where they read it."""
        assert not self.predicted_by
        [plan] = self.plans
        for group, block, place in plan.local_moves.tolist():
            for touched in (block, place):
                self.fill(group, touched, [-1] * self.setup.block_size)
        self.plans.clear()
        self.drafts.clear()
        self.scheduler.abandon()
        self._note_lost_pins()
        for request in self.requests.values():
            request.computed = None

    def _run(self, plan: _core.StepPlan, drafts: dict[int, list[int]]) -> None:
        self._move(plan)
        rows = rows_of(plan)
        ids = [row.request_id for row in rows]
        assert len(set(ids)) == len(ids)
        assert len({row.slot for row in rows}) == len(rows)
        self.computed_tokens.append(len(plan.token_ids))
        logits = list(zip(plan.logits_rows.tolist(), plan.logits_seqs.tolist(), strict=True))
        written: dict[Cell, Bytes] = {}
        at = 0
        for s, row in enumerate(rows):
            n = row.end - row.begin
            assert n > 0
            assert plan.positions[at : at + n].tolist() == list(range(row.begin, row.end))
            tokens = [self.last_tokens[~t] if t < 0 else t for t in plan.token_ids[at : at + n].tolist()]
            at += n
            request = self.requests.get(row.request_id)
            if request is None:  # computed in vain
                self._spoil(row, written)
                continue
            draft = drafts.get(row.request_id, [])
            all_tokens = request.tokens + draft
            assert tokens == all_tokens[row.begin : row.end]
            first = at - 1 - len(draft) if row.end == len(all_tokens) else at
            assert [i for i, sequence in logits if sequence == s] == list(range(first, at))
            self._read_and_write(request, row, all_tokens, written)
        self.bytes.update(written)
        assert plan.has_unknown_tokens == bool((plan.token_ids < 0).any())
        assert at == len(plan.token_ids) == len(plan.positions) == plan.query_starts[-1]
        assert logits == sorted(logits)

    def _check_budget(self, rows: list[Row]) -> None:
        num_tokens = sum(row.end - row.begin for row in rows)
        assert num_tokens <= self.setup.max_num_batched_tokens or (
            len(rows) == 1 and not self.setup.enable_chunked_prefill
        )
        assert len(rows) <= self.setup.max_num_seqs
        if not self.setup.enable_chunked_prefill:
            assert all(row.end >= len(self.requests[row.request_id].tokens) for row in rows)

    def _check_progress(self, request: Request, row: Row) -> None:
        """Every token from the first uncached one on is computed, once and in order."""
        if request.computed is None:
            assert row.begin % self.setup.block_size == 0
            assert row.begin == 0 or (self.setup.enable_prefix_caching and not request.skip_prefix_match)
        else:
            assert row.begin == request.computed
        assert self.slots.setdefault(row.request_id, row.slot) == row.slot
        assert 0 <= row.slot < self.setup.max_num_seqs
        request.computed = row.end

    def _spoil(self, row: Row, written: dict[Cell, Bytes]) -> None:
        """Overwrite the KV of a request that has ended, in places where nothing else is written in this step."""
        for g, table in enumerate(row.tables):
            for position in range(row.begin, row.end):
                block = self.block_at(g, table[position // self.setup.block_size])
                for cell in self.cells(g, block, position % self.setup.block_size):
                    assert cell not in written, "two requests write to one place"
                    written[cell] = (g, -1)

    def _read_and_write(self, request: Request, row: Row, tokens: list[int], written: dict[Cell, Bytes]) -> None:
        size = self.setup.block_size
        prefix = self.prefixes.of(request.namespace, tokens[: row.end])
        for g, ((_, _, window), table) in enumerate(zip(self.setup.groups, row.tables, strict=True)):
            assert len(table) == -(-row.end // size)
            for position in range(row.end):
                entry = table[position // size]
                if entry == _core.NO_BLOCK:
                    assert window > 0
                    assert position <= row.begin - window, "a token inside the window has no block"
                    continue
                block = self.block_at(g, entry)
                for cell in self.cells(g, block, position % size):
                    if position < row.begin:
                        expected = (g, prefix[position])
                        assert self.bytes.get(cell) == expected, "a block table points at another prefix's bytes"
                        assert cell not in written, "read while written"
                    else:
                        assert block < self.setup.groups[g][1], "a step writes beyond the pool"
                        assert cell not in written, "two requests write to one place"
                        written[cell] = (g, prefix[position])

    def commit(self, choose: dict[int, int] | None = None, broken: int = -1) -> _core.StepResult:
        """Commit the oldest step.

        `choose` has the first tokens of some requests by id (-1: none); others follow from those so far, but there is
        none for row `broken` of those that sample.
        """
        plan, drafts = self.plans.pop(0), self.drafts.pop(0)
        self._run(plan, drafts)
        ids = plan.request_ids[plan.logits_seqs].tolist()
        by_request = {i: self._sample(i, draft) for i, draft in drafts.items()}
        for i, token in (choose or {}).items():
            by_request.get(i, [0])[0] = token
        if broken < len(ids) and broken >= 0:
            by_request[ids[broken]][broken - ids.index(ids[broken])] = -1
        sampled = [token for tokens in by_request.values() for token in tokens]
        self.last_tokens.update(zip(plan.row_slots[plan.logits_seqs].tolist(), sampled, strict=True))
        result = self.scheduler.commit(np.array(sampled, np.int32))
        for naive in self.predicted_by:
            naive.commit(by_request)
        assert result.request_ids.tolist() == ids
        assert result.token_ids.tolist() == sampled
        reasons = [reason for i, tokens in by_request.items() for reason in self._append_all(i, tokens, drafts[i])]
        assert result.finish_reasons.tolist() == reasons
        self._guess()
        return result

    def _guess(self) -> None:
        """Note the draft of each running request that has a token."""
        for request_id, request in self.requests.items():
            if self.setup.lookup is not None and request.computed is not None and request.outputs:
                request.draft = self.setup.lookup.guess_next(request.tokens)
                for naive in self.predicted_by:
                    naive.set_draft(request_id, request.draft)

    def _sample(self, request_id: int, draft: list[int]) -> list[int]:
        """Return a token behind the request's last one, and behind each of its draft."""
        counts = range(len(draft) + 1)
        if request_id not in self.requests:
            return [0 for _ in counts]
        return [sampled_behind(self.requests[request_id].tokens + draft[:i]) for i in counts]

    def _append_all(self, request_id: int, tokens: list[int], draft: list[int]) -> list[int]:
        """Return the reason of every token of a row."""
        request, reasons = self.requests.get(request_id), list[int]()
        if request is None:
            return [ABORTED] * len(tokens)
        for i, token in enumerate(tokens):
            counts = tokens[:i] == draft[:i] and all(reason == RUNNING for reason in reasons)
            reasons.append(self._append(request_id, token) if counts else REJECTED)
        if draft and request.computed is not None:
            request.computed -= reasons.count(REJECTED)
        return reasons

    def _append(self, request_id: int, token: int) -> int:
        if request_id not in self.requests:
            return ABORTED
        request = self.requests[request_id]
        if token < 0:
            del self.requests[request_id]
            del self.slots[request_id]
            return BROKEN
        request.tokens.append(token)
        request.draft = []
        num_outputs = len(request.outputs)
        if token in request.stop and num_outputs >= request.min_tokens:
            reason = STOP
        elif num_outputs == request.max_tokens or len(request.tokens) == self.setup.max_model_len:
            reason = LENGTH
        else:
            return RUNNING
        del self.requests[request_id]
        del self.slots[request_id]
        self.finished[request_id] = Finished(request.outputs, reason, request.cached)
        return reason

    def step(self) -> bool:
        if self.schedule() is None:
            return False
        self.commit()
        self.check()
        return True

    def step_ahead(self) -> bool:
        """The next step is planned before the one in progress is committed."""
        planned = self.schedule() is not None
        if len(self.plans) > planned:
            self.commit()
        self.check()
        return bool(self.plans)

    def drain(self) -> None:
        """Run until every known request has finished."""
        while self.plans:
            self.commit()
        for load in list(self.loads):
            self.end_loading(load, is_loaded=True)
        # Every step computes a token, and each preemption wastes no more than what was computed before it.
        work = sum(r.max_tokens + len(r.prompt) for r in self.requests.values())
        for _ in range(4 + work * (1 + len(self.requests))):
            if not self.scheduler.has_work():
                break
            if not self.step():
                assert self.away, "work, but nothing can run"
                self.take_all_back()
        assert not self.requests
        assert not self.scheduler.has_work()

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_prefix_cache()
        for naive in self.predicted_by:
            naive.reset_prefix_cache()

    def check(self) -> None:
        self.scheduler.check_invariants()
        stats = self.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.requests)
        # A preempted request keeps its slot until a plan names it: there is none while all that could run is loading.
        assert stats.num_running <= len(self.slots)
        for g, (_, num_blocks, _) in zip(stats.groups, self.setup.groups, strict=True):
            assert g.total == num_blocks
            assert g.free + g.used + g.cached + g.lent + g.in_flight + g.loading + g.elsewhere == g.total
            assert min(g.free, g.used, g.cached, g.in_flight, g.elsewhere) >= 0
            assert g.elsewhere == 0 or self.setup.blocks_per_extent
            assert g.in_flight == 0 or self.plans
        in_name_of_the_first = len(self.away) * sum(self.setup.blocks_per_extent[:1])
        assert [g.lent for g in stats.groups] == [in_name_of_the_first, *(0 for _ in stats.groups[1:])]
        for naive in self.predicted_by:
            assert stats.num_running == len(self.slots) - len(naive.preempted)
            assert stats.num_preemptions_total == naive.num_preemptions
            assert stats.num_displaced_total == naive.num_displaced
            assert self.scheduler.num_dropped_offers() == naive.num_dropped
            assert [g.pinned for g in stats.groups] == naive.num_pinned([*naive.pins.values()])
            for g, pool in zip(stats.groups, naive.pools, strict=True):
                assert g.cached == len(pool.evictable())
                assert g.in_flight == pool.num_in_flight()
                assert g.free == pool.num_free()
                assert g.loading == pool.num_loading()
        if not self.requests:
            assert all(g.used == g.pinned for g in stats.groups)
        self._check_pins()

    def _check_pins(self) -> None:
        """Check that all that is pinned is here, whatever requests wanted since."""
        keys, _, _ = self.scheduler.resident_blocks()
        resident = {keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)}
        has_full_attention = any(window == 0 for _, _, window in self.setup.groups)
        for pinned in self.pins.values():
            kept = {pinned[i : i + KEY_BYTES] for i in range(0, len(pinned), KEY_BYTES)}
            assert not has_full_attention or kept <= resident
        for stats in self.scheduler.stats().groups:
            assert stats.pinned <= stats.used
            assert self.pins or stats.pinned == 0
