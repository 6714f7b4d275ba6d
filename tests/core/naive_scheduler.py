"""The scheduling policy in plain Python, without regard for speed: lists and tuples where the C++ has tables.

A full block is identified by (namespace, tokens up to its end) itself; no hashing, no block numbers. The plans must be
equal row for row, and so must the counts of the pools.

It is one file, for it is one model: who checks a rule of it should find all rules beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import frexp

from naive_boundaries import NaiveBoundaries, Prefix, Worth
from naive_lookup import Lookup
from naive_shares import ANSWER, PROMPT, NaiveShares

from swiftkv import _core
from swiftkv.policies import SchedulingPolicy

MAX_MOVES, MAX_REFUSALS = 64, 16  # of one step
NUM_CLASSES, PRIORITIES_PER_CLASS = 4, 1 << 32
PRIVATE: Prefix = ()  # a block that is not in the prefix index


def class_of(priority: int) -> int:
    steps = (priority + PRIORITIES_PER_CLASS // 2) // PRIORITIES_PER_CLASS
    return min(max(0, steps + 1), NUM_CLASSES - 1)


@dataclass(frozen=True)
class Setup:
    groups: tuple[tuple[int, int, int], ...]  # (num_layers, num_blocks, window)
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    retention_interval: int | None = None
    long_prefill_token_threshold: int | None = None
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int = 1
    scheduling_policy: SchedulingPolicy = "priority"
    # Each group has its own, where they share extents; the plans are not predicted then.
    blocks_per_extent: tuple[int, ...] = ()
    lend: tuple[tuple[int, int], ...] = ()  # of each link its extents, and how many of the pool's are one of them
    lookup: Lookup | None = None  # makes drafts; None: they come from `set_draft` alone

    @property
    def num_extents(self) -> int:
        return self.groups[0][1] // self.blocks_per_extent[0]

    def scheduler(self) -> _core.Scheduler:
        sizes = self.blocks_per_extent or [0] * len(self.groups)
        return _core.Scheduler(
            [_core.GroupSpec(*g, blocks_per_extent=n) for g, n in zip(self.groups, sizes, strict=True)],
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_chunked_prefill=self.enable_chunked_prefill,
            lend_links=[_core.Link(0, count, size * sizes[0]) for count, size in self.lend],
            retention_interval=self.retention_interval,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_long_partial_prefills=self.max_long_partial_prefills,
            scheduling_policy=self.scheduling_policy,
            num_speculative_tokens=self.lookup.num_speculative_tokens if self.lookup else None,
            prompt_lookup_min=self.lookup.shortest if self.lookup else 1,
            prompt_lookup_max=self.lookup.longest if self.lookup else 1,
        )


@dataclass
class NaiveRequest:
    id: int
    order: tuple[int, int]  # priority, arrival
    namespace: bytes
    tokens: list[int]
    last_len: int  # number of tokens at which it has reached a limit
    prompt_len: int
    min_tokens: int
    stop: list[int]
    skip_prefix_match: bool
    arrival_s: float
    deadline_s: float
    flow: int
    refused_since_s: float | None = None
    expected: int = 0  # blocks that the index knew of it when that was looked up last, while it waits
    num_shared: int = 0  # full blocks before its prompt left what others had computed
    tables: list[list[Prefix | None]] = field(default_factory=list)  # per group; None: outside the window
    computed: int = 0
    scheduled: int = 0  # by steps in progress
    unknown: int = 0  # tokens that they sample
    draft: list[int] = field(default_factory=list)
    drafting: bool = False  # a step in progress has a draft of it
    in_step: bool = False  # that is being planned
    awaits_loads: bool = False  # it runs, and gets the blocks that it lacks when loads end
    admitted: bool = False
    begun: int = 0  # its number among those that have begun, when it did so last
    displaced_len: int = 0  # its tokens when it was displaced last

    @property
    def service_class(self) -> int:
        return class_of(self.order[0])

    def num_tokens(self) -> int:
        return len(self.tokens) + self.unknown

    def remaining(self) -> int:
        return self.num_tokens() - self.computed - self.scheduled

    def left(self, block_size: int) -> int:
        return max(1, self.remaining() - self.expected * block_size)

    def is_ending(self) -> bool:
        return self.unknown > 0 and self.num_tokens() >= self.last_len

    def prefix(self, num_tokens: int) -> Prefix:
        return (self.namespace, *self.tokens[:num_tokens])


class NaivePool:
    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holders: dict[Prefix, int] = {}  # of the blocks in the index
        # Those without a holder, by worth, oldest first; and the worth of all that are worth something.
        self.lru: dict[Worth, list[Prefix]] = {worth: [] for worth in Worth}
        self.worths: dict[Prefix, Worth] = {}
        self.num_private = 0
        # The last step that may use a block that was let go meanwhile: private ones, and those in the index.
        self.retired: list[int] = []
        self.busy: dict[Prefix, int] = {}
        self.loading: dict[Prefix, int] = {}  # by load, of the blocks in the index
        self.forgotten_loads: set[int] = set()
        self.offered: set[Prefix] = set()  # to storage, of the blocks in the index

    def num_in_flight(self) -> int:
        return len(self.retired) + sum(self.holders.get(prefix) == 0 for prefix in self.busy)

    def num_free(self) -> int:
        return self.num_blocks - self.num_private - len(self.holders) - len(self.retired) - self.num_loading()

    def num_loading(self) -> int:
        return len(self.loading) + len(self.forgotten_loads)

    def num_available(self) -> int:
        return self.num_free() + len(self.evictable())

    def evictable(self) -> list[Prefix]:
        return [prefix for worth in Worth for prefix in self.lru[worth]]

    def worth(self, prefix: Prefix) -> Worth:
        return self.worths.get(prefix, Worth.NONE)

    def set_worth(self, prefix: Prefix, worth: Worth) -> None:
        before, self.worths[prefix] = self.worth(prefix), worth
        if prefix in self.lru[before] and worth != before:
            self.lru[before].remove(prefix)
            self.lru[worth].insert(0 if worth < before else len(self.lru[worth]), prefix)

    def rest(self, prefix: Prefix) -> None:
        self.lru[self.worth(prefix)].append(prefix)

    def hold(self, prefix: Prefix) -> None:
        if self.holders[prefix] == 0 and prefix not in self.busy:
            self.lru[self.worth(prefix)].remove(prefix)
        self.holders[prefix] += 1

    def drop(self, prefix: Prefix) -> None:
        if prefix == PRIVATE:
            self.num_private -= 1
            return
        self.holders[prefix] -= 1
        if self.holders[prefix] == 0 and prefix not in self.busy:
            self.rest(prefix)

    def retire(self, prefix: Prefix, until: int) -> None:
        if prefix == PRIVATE:
            self.retired.append(until)
        elif self.holders[prefix] == 1:
            self.busy[prefix] = until
        self.drop(prefix)

    def settle(self, step: int) -> None:
        self.retired = [until for until in self.retired if until > step]
        for prefix in [prefix for prefix, until in self.busy.items() if until <= step]:
            del self.busy[prefix]
            if self.holders[prefix] == 0:
                self.rest(prefix)

    def forget_load(self, prefix: Prefix) -> None:
        if prefix in self.loading:
            self.forgotten_loads.add(self.loading.pop(prefix))
            self.worths.pop(prefix, None)

    def end_loading(self, load: int, prefix: Prefix, is_loaded: bool) -> None:
        if self.loading.get(prefix) == load:
            del self.loading[prefix]
            if is_loaded:
                self.holders[prefix] = 0
                self.rest(prefix)
        else:
            self.forgotten_loads.remove(load)

    def forget(self, prefix: Prefix) -> None:
        if prefix not in self.holders:
            return
        assert self.holders.pop(prefix) == 0
        self.offered.discard(prefix)
        if prefix in self.busy:
            self.retired.append(self.busy.pop(prefix))
        else:
            self.lru[self.worth(prefix)].remove(prefix)
        self.worths.pop(prefix, None)


@dataclass
class NaivePlan:
    rows: list[tuple[int, int, int]] = field(default_factory=list)  # request id, first position, number of tokens
    samples: list[bool] = field(default_factory=list)  # of each row
    drafts: list[list[int]] = field(default_factory=list)  # of each row: its last tokens
    new: list[tuple[int, int]] = field(default_factory=list)  # request id, cached tokens
    preempted: list[int] = field(default_factory=list)


class NaiveScheduler:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.windows = [window for _, _, window in setup.groups]
        self.pools = [NaivePool(num_blocks) for _, num_blocks, _ in setup.groups]
        self.boundaries = NaiveBoundaries([self.tail(window) if window else None for window in self.windows])
        self.shares = NaiveShares(setup.max_num_batched_tokens)
        self.waiting: list[NaiveRequest] = []
        self.running: list[NaiveRequest] = []
        self.arrivals = 0
        self.open: list[NaivePlan] = []
        self.must_commit = False
        self.preempted: list[int] = []  # that no plan has named yet
        self.num_preemptions = 0
        self.num_begun = 0
        self.oldest_lack = 0  # how many more tokens the shortest requests got, with `turns`
        self.is_turn_of_oldest = False
        self.num_displaced = [0] * NUM_CLASSES
        self.num_planned = self.num_settled = 0
        self.pins: dict[int, list[list[Prefix | None]]] = {}  # blocks that are kept, per group; the oldest first
        self.lost_pins: list[int] = []
        self.has_refused = False  # in the step that is being planned
        self.writes_back = False
        self.offers: list[tuple[int, Prefix]] = []  # that wait for storage to take them
        self.num_dropped = 0  # blocks that write-back has lost

    def add(
        self,
        request_id: int,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        stop: list[int],
        namespace: bytes,
        skip_prefix_match: bool,
        priority: int,
        arrival_s: float,
        deadline_s: float,
        flow: int,
        flow_weight: float,
    ) -> None:
        priority = 0 if self.setup.scheduling_policy == "fcfs" else priority
        last_len = min(len(prompt) + max_tokens, self.setup.max_model_len)
        order = (priority, self.arrivals)
        self.arrivals += 1
        request = NaiveRequest(
            request_id,
            order,
            namespace,
            list(prompt),
            last_len,
            len(prompt),
            min_tokens,
            stop,
            skip_prefix_match,
            arrival_s,
            deadline_s,
            flow,
        )
        self.shares.know(flow, flow_weight)
        self.clear(request)
        self.wait(request)

    def set_draft(self, request_id: int, tokens: list[int]) -> None:
        for request in [*self.waiting, *self.running]:
            if request.id == request_id:
                request.draft = tokens

    def wait(self, request: NaiveRequest) -> None:
        request.expected = 0
        self.look_up(request)
        request.refused_since_s = None
        self.shares.begin_waiting(request.flow, (r.flow for r in self.waiting if r.order[0] == request.order[0]))
        self.waiting.append(request)

    def stop_waiting(self, request: NaiveRequest) -> None:
        self.waiting.remove(request)
        self.shares.last = request.flow

    # ---- the order of those that wait ----

    def is_by_length(self) -> bool:
        return self.setup.scheduling_policy in ("spf", "hrrn", "turns")

    def left(self, request: NaiveRequest) -> int:
        return request.left(self.setup.block_size)

    def lane(self, request: NaiveRequest) -> int:
        return self.left(request).bit_length() if self.setup.scheduling_policy in ("hrrn", "turns") else 0

    def interrupts_prompts(self) -> bool:
        return self.setup.scheduling_policy in ("spf", "hrrn", "turns", "deadline")

    def order_in_lane(self, request: NaiveRequest) -> tuple[float, int]:
        ranks = {"spf": self.left(request), "deadline": request.deadline_s}
        return ranks.get(self.setup.scheduling_policy, 0), request.order[1]

    def order_now(self, request: NaiveRequest) -> tuple[float, ...]:
        """Return what orders requests of different lanes, and prompts that are computed in part."""
        left, (priority, arrival) = self.left(request), request.order
        waited_s = self.now_s - request.arrival_s
        by_turns = -arrival if self.is_turn_of_oldest else -left
        urgencies = {"spf": -left, "hrrn": waited_s / left, "turns": by_turns, "deadline": -request.deadline_s}
        urgency = urgencies.get(self.setup.scheduling_policy, -arrival)
        return priority, -urgency, left, arrival

    def lanes(self, priority: int) -> dict[tuple[int, int], list[NaiveRequest]]:
        lanes: dict[tuple[int, int], list[NaiveRequest]] = {}
        for request in sorted((r for r in self.waiting if r.order[0] == priority), key=self.order_in_lane):
            lanes.setdefault((request.flow, self.lane(request)), []).append(request)
        return lanes

    def in_order(self) -> Iterator[NaiveRequest]:
        """Yield one after the other: who is admitted meanwhile is charged for at once."""
        for priority in sorted({r.order[0] for r in self.waiting}):
            lanes = list(self.lanes(priority).values())
            while lanes:
                best = self.first([lane[0] for lane in lanes])
                yield best
                for lane in lanes:
                    if lane[0] is best:
                        del lane[0]
                lanes = [lane for lane in lanes if lane]

    def first(self, requests: list[NaiveRequest]) -> NaiveRequest:
        """Return the first of requests of one priority."""
        flows = {r.flow for r in requests}
        return min(requests, key=lambda r: (self.shares.is_past(r.flow, flows), self.order_now(r)))

    def look_up(self, request: NaiveRequest) -> bool:
        """Note how many blocks of its begin the index knows, and return whether these are others than before."""

        before = known = request.expected
        if self.is_by_length() and not request.skip_prefix_match:
            while known < self.max_match(request) and self.is_known(request, known):
                known += 1
            while known == before and known > 0 and not self.is_known(request, known - 1):
                known = before = known - 1
        is_new = known != request.expected
        request.expected = known
        return is_new

    def is_known(self, request: NaiveRequest, block: int) -> bool:
        prefix = request.prefix((block + 1) * self.setup.block_size)
        return any(prefix in pool.holders or prefix in pool.loading for pool in self.pools)

    def note_cached(self) -> None:
        """Look up those again of whose prompts more is cached than before."""
        for request in self.waiting:
            if request.expected < self.max_match(request) and self.is_known(request, request.expected):
                self.look_up(request)

    def refresh_waiting(self) -> None:
        """Look up the first requests of the lanes of the first priority again."""
        if not self.waiting or not self.is_by_length():
            return
        priority, num_moves = min(r.order[0] for r in self.waiting), 0
        for lane in sorted(self.lanes(priority)):
            while num_moves < MAX_MOVES and lane in (lanes := self.lanes(priority)):
                if not self.look_up(lanes[lane][0]):
                    break
                num_moves += 1

    def clear(self, request: NaiveRequest) -> None:
        request.tables = [[] for _ in self.pools]
        request.computed = request.scheduled = request.unknown = 0
        request.drafting = request.awaits_loads = False

    def abort(self, request_id: int) -> None:
        self.preempted = [i for i in self.preempted if i != request_id]
        for request in [r for r in self.waiting if r.id == request_id]:
            self.stop_waiting(request)
        for request in [r for r in self.running if r.id == request_id]:
            self.leave(request)

    def leave(self, request: NaiveRequest) -> None:
        self.running.remove(request)
        self.keep_boundary(request, self.num_committed(request), Worth.KEPT)
        self.release(request)

    def release(self, request: NaiveRequest) -> None:
        for pool, table in zip(self.pools, request.tables, strict=True):
            for prefix in reversed(table):
                if prefix == PRIVATE and request.scheduled:
                    pool.retire(prefix, self.num_planned)
                elif prefix is not None:
                    pool.drop(prefix)
        self.clear(request)

    # ---- pins ----

    def pin(self, pin_id: int, namespace: bytes, tokens: list[int], max_share: float) -> tuple[int, bool]:
        """Return how many blocks of a prefix are here, and whether they are kept from now on."""
        size = self.setup.block_size
        for length in range(len(tokens) // size, 0, -1):
            tables: list[list[Prefix | None]] = [
                [None] * first + [(namespace, *tokens[: (i + 1) * size]) for i in range(first, length)]
                for first in self.first_blocks(length)
            ]
            pinned = list(zip(self.pools, tables, strict=True))
            if all(prefix in pool.holders for pool, table in pinned for prefix in table if prefix is not None):
                break
        else:
            return 0, False
        if self.share_of_pins([*self.pins.values(), tables]) > max_share:
            return length, False
        self.pins[pin_id] = tables
        for pool, table in pinned:
            for prefix in table:
                if prefix is not None:
                    pool.hold(prefix)
        return length, True

    def share_of_pins(self, pins: list[list[list[Prefix | None]]]) -> float:
        held = self.num_pinned(pins)
        return max(count / pool.num_blocks for count, pool in zip(held, self.pools, strict=True))

    def num_pinned(self, pins: Sequence[list[list[Prefix | None]]]) -> list[int]:
        """Return how many blocks pins hold, per group."""
        return [len({prefix for tables in pins for prefix in tables[g]} - {None}) for g in range(len(self.pools))]

    def unpin(self, pin_id: int) -> bool:
        tables = self.pins.pop(pin_id, None)
        for pool, table in zip(self.pools, tables or [], strict=False):
            for prefix in reversed(table):
                if prefix is not None:
                    pool.drop(prefix)
        return tables is not None

    def give_way(self) -> bool:
        """The oldest pin ends for the sake of a request."""
        if not self.pins:
            return False
        self.lost_pins.append(next(iter(self.pins)))
        return self.unpin(self.lost_pins[-1])

    # ---- write-back ----

    def take_offers(self, max_blocks: int) -> list[tuple[int, Prefix]]:
        """Return the blocks that go first when a quarter of a group's pool is taken, each once."""
        for g, pool in enumerate(self.pools):
            num_near = max(0, pool.num_blocks // 4 - pool.num_free())
            for prefix in pool.evictable()[:num_near]:
                if len(self.offers) < max_blocks:
                    self.offer_what_goes_with(g, prefix)
        taken: list[tuple[int, Prefix]] = []
        while self.offers and len(taken) < max_blocks:
            g, prefix = self.offers.pop(0)
            if prefix in self.pools[g].holders:
                taken.append((g, prefix))
            else:
                self.num_dropped += 1
        return taken

    def offer_what_goes_with(self, g: int, prefix: Prefix) -> None:
        """Offer what goes with a block; tails that have a part in it are offered as a whole."""
        num_new = sum(self.offer(other, prefix) for other in self.groups_that_lose(g))
        if num_new > 0:
            for boundary in self.boundaries.kept:
                for beside in boundary.prefixes if prefix in boundary.prefixes else []:
                    for other, window in enumerate(self.windows):
                        if window:
                            self.offer(other, beside)

    def offer(self, g: int, prefix: Prefix) -> bool:
        is_new = self.is_unstored(g, prefix)
        if is_new:
            self.pools[g].offered.add(prefix)
            self.offers.append((g, prefix))
        return is_new

    def is_unstored(self, g: int, prefix: Prefix) -> bool:
        """Whether a block should be stored and is not; of a window only what a boundary keeps."""
        pool = self.pools[g]
        is_wanted = not self.windows[g] or pool.worth(prefix) != Worth.NONE
        return prefix in pool.holders and is_wanted and prefix not in pool.offered

    # ---- schedule ----

    def schedule(self, now_s: float) -> NaivePlan:
        """Plan the next step. A plan without rows means that nothing can be planned now."""
        self.plan, self.now_s = NaivePlan(), now_s
        if self.open and self.must_commit:
            return self.plan
        self.must_commit = self.has_refused = False
        self.is_turn_of_oldest = self.oldest_lack > 0
        num_preempted = len(self.preempted)
        self.budget = self.setup.max_num_batched_tokens
        self.displaced: list[NaiveRequest] = []  # in this step
        self.num_begun_before = self.num_begun
        self.note_cached()
        if any(map(self.may_seat, self.waiting)):
            self.refresh_waiting()
        if not self.setup.enable_chunked_prefill:
            self.admit_oversized()
        for is_decode in (True, False):
            if not is_decode and not self.must_commit and not self.has_preempted(num_preempted):
                self.admit_before_prefills()
            for request in self.running_in_order(is_decode):
                due = request in self.running and not request.in_step and (request.remaining() == 1) == is_decode
                n = self.chunk(request, self.budget)
                if not due or request.is_ending() or request.drafting or self.budget <= 0 or self.must_commit:
                    continue
                if fitting := self.make_room(request, n):
                    self.put(request, fitting)
        has_preempted = self.has_preempted(num_preempted)
        if not self.must_commit and (not has_preempted or not self.plan.rows):
            if has_preempted and not self.setup.enable_chunked_prefill:
                self.admit_oversized()
            self.admit_waiting()
        is_alone = not (self.running or self.open or any(pool.num_loading() for pool in self.pools))
        while is_alone and not self.plan.rows and self.has_refused and self.give_way():
            if not self.setup.enable_chunked_prefill:
                self.admit_oversized()
            self.admit_waiting()
        if not self.must_commit:
            self.add_drafts()
        for request in self.running:
            request.in_step = False
        if self.plan.rows:
            self.plan.preempted, self.preempted = self.preempted, []
            self.open.append(self.plan)
            self.num_planned += 1
        return self.plan

    def has_preempted(self, num_before: int) -> bool:
        """Return whether this step has taken blocks from a request for those that others grow into."""
        return len(self.preempted) - len(self.displaced) > num_before

    def has_slot(self) -> bool:
        return len(self.running) < self.setup.max_num_seqs

    def may_seat(self, request: NaiveRequest) -> bool:
        return self.has_slot() or any(r.service_class > request.service_class for r in self.running)

    def admit_oversized(self) -> None:
        for head in self.in_order():
            size = len(head.tokens)
            if self.may_seat(head) and size > self.budget and not self.is_prefix_coming(head):
                self.admit(head, size)
            return

    def running_in_order(self, is_decode: bool) -> list[NaiveRequest]:
        return list(self.running) if is_decode else self.prompts_in_part()

    def prompts_in_part(self) -> list[NaiveRequest]:
        """Those that the step does not have yet, as if they waited."""
        prompts = [r for r in self.running if not r.in_step and r.remaining() > 1]

        def place(request: NaiveRequest) -> tuple[int, bool, tuple[float, ...]]:
            priority = request.order[0]
            flows = {r.flow for r in prompts if r.order[0] == priority}
            return priority, self.shares.is_past(request.flow, flows), self.order_now(request)

        return sorted(prompts, key=place)

    def admit_before_prefills(self) -> None:
        if prompts := self.prompts_in_part():
            self.admit_waiting(before=prompts[0])

    def goes_before(self, waiting: NaiveRequest, prompt: NaiveRequest) -> bool:
        if waiting.service_class != prompt.service_class or prompt not in self.running:
            return waiting.service_class < prompt.service_class
        if waiting.order[0] == prompt.order[0]:
            if self.shares.is_past(prompt.flow, [waiting.flow]):
                return True
            if self.shares.is_past(waiting.flow, [prompt.flow]):
                return False
        return self.interrupts_prompts() and self.order_now(waiting) < self.order_now(prompt)

    def admit_waiting(self, before: NaiveRequest | None = None) -> None:
        num_refused = 0
        refused: NaiveRequest | None = None  # the first
        for request in self.in_order():
            if self.budget <= 0 or not self.may_seat(request):
                return
            if any(request.service_class >= r.service_class for r in self.displaced):
                return
            if before is not None and not self.goes_before(request, before):
                return
            if refused is not None and self.shares.is_past(request.flow, [refused.flow]):
                return
            if not self.may_begin(request) or self.is_prefix_coming(request) or self.admit(request, self.budget):
                continue
            if self.must_commit or not self.has_slot():
                return
            num_refused += 1
            refused = refused or request
            if num_refused == 1 and request.refused_since_s is None:
                request.refused_since_s = self.now_s
            if num_refused == MAX_REFUSALS or (num_refused == 1 and self.holds_up_others(request)):
                return

    def holds_up_others(self, request: NaiveRequest) -> bool:
        """For a second, then not for two, then for four, and so on."""
        assert request.refused_since_s is not None
        _, exponent = frexp(1 + (self.now_s - request.refused_since_s))
        return (exponent - 1) % 2 == 0

    def chunk(self, request: NaiveRequest, budget: int) -> int:
        return min(budget, request.remaining(), self.setup.long_prefill_token_threshold or budget)

    def is_long(self, request: NaiveRequest) -> bool:
        threshold = self.setup.long_prefill_token_threshold
        return threshold is not None and self.left(request) > threshold

    def may_begin(self, request: NaiveRequest) -> bool:
        in_part = [r for r in self.running if r.unknown == 0 and r.remaining() > 1]
        partial = [r for r in in_part if r.service_class <= request.service_class]
        most = self.setup.max_num_partial_prefills
        if most is not None and len(partial) >= most:
            return False
        return not self.is_long(request) or sum(map(self.is_long, partial)) < self.setup.max_long_partial_prefills

    def max_match(self, request: NaiveRequest) -> int:
        if request.skip_prefix_match or not self.setup.enable_prefix_caching:
            return 0
        return (len(request.tokens) - 1) // self.setup.block_size

    def is_prefix_coming(self, request: NaiveRequest) -> bool:
        length = self.match(request)
        for pool, first in zip(self.pools, self.first_blocks(length), strict=True):
            if any(request.prefix((i + 1) * self.setup.block_size) in pool.loading for i in range(first, length)):
                return True
        for other in self.running:
            end = (other.computed // self.setup.block_size + 1) * self.setup.block_size
            if (
                not other.skip_prefix_match
                and end <= self.max_match(request) * self.setup.block_size
                and end <= len(other.tokens)
                and other.prefix(end) == request.prefix(end)
            ):
                return True
        return False

    def match(self, request: NaiveRequest) -> int:
        """Return the longest usable prefix in blocks: all in full attention, its tail elsewhere."""
        size = self.setup.block_size
        for length in range(self.max_match(request), 0, -1):
            if all(
                request.prefix((i + 1) * size) in pool.holders or request.prefix((i + 1) * size) in pool.loading
                for pool, first in zip(self.pools, self.first_blocks(length), strict=True)
                for i in range(first, length)
            ):
                return length
        return 0

    def first_blocks(self, length: int) -> list[int]:
        """Return the first block that each group needs of a prefix."""
        return [max(0, length - self.tail(window)) if window else 0 for window in self.windows]

    def tail(self, window: int) -> int:
        """Return how many blocks the token behind a full block looks back on: `window` counts that token itself."""
        return -(-(window - 1) // self.setup.block_size)

    def begin_loading(self, load: int, prefix: Prefix) -> bool:
        is_known = any(prefix in pool.holders or prefix in pool.loading for pool in self.pools)
        if is_known or any(pool.num_free() == 0 for pool in self.pools) or any(r.awaits_loads for r in self.running):
            return False
        for pool, window in zip(self.pools, self.windows, strict=True):
            pool.loading[prefix] = load
            if window:
                pool.worths[prefix] = Worth.KEPT
        return True

    def end_loading(self, load: int, prefix: Prefix, is_loaded: bool) -> None:
        for g, pool in enumerate(self.pools):
            was_known = pool.loading.get(prefix) == load
            pool.end_loading(load, prefix, is_loaded)
            if was_known and not is_loaded:
                pool.worths.pop(prefix, None)
                self.lose(prefix, g)

    # ---- what is kept in windows ----

    def num_known(self, request: NaiveRequest) -> int:
        """Return how many blocks of a prompt the index knows; without full attention, behind gaps too."""
        has_full = 0 in self.windows
        known = 0
        for i in range(self.max_match(request)):
            prefix = request.prefix((i + 1) * self.setup.block_size)
            if any(prefix in pool.holders or prefix in pool.loading for pool in self.pools):
                known = i + 1
            elif has_full:
                break
        return known

    def keep_boundary(self, request: NaiveRequest, length: int, worth: Worth) -> None:
        prefixes: list[Prefix] = []
        for i in range(length - 1, max(-1, length - 1 - self.boundaries.span), -1):
            prefix = request.prefix((i + 1) * self.setup.block_size)
            resident = [prefix in pool.holders or prefix in pool.loading for pool in self.pools]
            for is_there, tail in zip(resident, self.boundaries.tails, strict=True):
                if not is_there and (tail is None or length - 1 - i < tail):
                    return
            if not any(resident):
                break
            prefixes.append(prefix)
        if prefixes and self.has_histories(request, length):
            self.boundaries.keep(prefixes, worth)
            self.set_worths(prefixes)

    def has_histories(self, request: NaiveRequest, length: int) -> bool:
        """Tell whether groups without a window have every block of a prefix."""
        prefixes = [request.prefix((i + 1) * self.setup.block_size) for i in range(length)]
        return all(
            window or prefix in pool.holders or prefix in pool.loading
            for pool, window in zip(self.pools, self.windows, strict=True)
            for prefix in prefixes
        )

    def keep_boundaries(self, request: NaiveRequest, begin: int, end: int) -> None:
        """Keep the boundaries of a request behind its first `begin` blocks, and up to `end` blocks."""
        interval = self.setup.retention_interval
        for length in range(begin + 1, end + 1):
            tokens = range(length * self.setup.block_size, (length + 1) * self.setup.block_size)
            if length > 0 and interval is not None and any(at % interval == 0 for at in tokens):
                self.keep_boundary(request, length, Worth.INTERVAL)
        for length in (request.prompt_len // self.setup.block_size, request.num_shared):
            if begin < length <= end:
                self.keep_boundary(request, length, Worth.KEPT)

    def lose(self, prefix: Prefix, g: int) -> None:
        self.set_worths(self.boundaries.lose(g, prefix))
        if not any(prefix in pool.holders or prefix in pool.loading for pool in self.pools):
            self.boundaries.forget(prefix)

    def set_worths(self, prefixes: list[Prefix]) -> None:
        for prefix in prefixes:
            for g, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
                if window and (prefix in pool.holders or prefix in pool.loading):
                    pool.set_worth(prefix, self.boundaries.worth(g, prefix))

    def groups_that_lose(self, g: int) -> Sequence[int]:
        """Return the groups whose blocks go when a group loses one: with full attention all of them."""
        return [g] if self.windows[g] else range(len(self.pools))

    def evict(self, g: int, prefix: Prefix) -> None:
        for other in self.groups_that_lose(g):
            self.num_dropped += self.writes_back and self.is_unstored(other, prefix)
            self.pools[other].forget(prefix)
        self.lose(prefix, g)

    def admit(self, request: NaiveRequest, budget: int) -> bool:
        size = self.setup.block_size
        length = self.match(request)
        orders = [{worth: list(order) for worth, order in pool.lru.items()} for pool in self.pools]
        for g, (pool, first) in enumerate(zip(self.pools, self.first_blocks(length), strict=True)):
            request.tables[g] = [None] * first + [request.prefix((i + 1) * size) for i in range(first, length)]
            for prefix in request.tables[g][first:]:
                assert prefix is not None
                pool.hold(prefix)
        request.computed = length * size
        num_known = self.num_known(request)
        request.num_shared = num_known if num_known < self.max_match(request) else 0
        wanted = self.chunk(request, budget) if self.setup.enable_chunked_prefill else request.remaining()
        may_fit = wanted <= budget and self.has_slot()
        n = self.fit(request, wanted, spare=len(self.running)) if may_fit else 0
        if n == 0:
            leaving = self.requests_to_displace(request) if wanted <= budget else []
            self.release(request)
            for pool, order in zip(self.pools, orders, strict=True):
                pool.lru = order  # to be looked at is not to be used
            self.has_refused = True
            return self.displace(leaving) and self.admit(request, budget)
        self.stop_waiting(request)
        request.expected = 0
        request.begun = self.num_begun
        self.num_begun += 1
        self.oldest_lack += -request.remaining() if self.is_turn_of_oldest else request.remaining()
        self.running = sorted([*self.running, request], key=lambda r: r.order)
        if not request.admitted:
            request.admitted = True
            self.shares.charge(request.flow, PROMPT * request.remaining())
            self.plan.new.append((request.id, request.computed))
        self.keep_boundaries(request, length - 1, length)
        self.put(request, n)
        return True

    # ---- who gives way to a higher class ----

    def requests_to_displace(self, request: NaiveRequest) -> list[NaiveRequest]:
        """Return the fewest, in their order, without which a request has a slot and room; none, if nothing helps."""
        giving_way = [r for r in self.running if self.gives_way(r, request)]
        giving_way.sort(key=lambda r: (-r.service_class, len(r.tokens) > r.prompt_len, -r.begun))
        for count in range(not self.has_slot(), len(giving_way) + 1):
            if self.has_room_without(request, giving_way[:count]):
                return giving_way[:count]
        return []

    def gives_way(self, request: NaiveRequest, waiting: NaiveRequest) -> bool:
        is_batch = request.service_class == NUM_CLASSES - 1
        return (
            request.service_class > waiting.service_class
            and (is_batch or len(request.tokens) > request.displaced_len)
            and request.begun < self.num_begun_before
        )

    def has_room_without(self, request: NaiveRequest, leaving: list[NaiveRequest]) -> bool:
        size = self.setup.block_size
        end = request.computed + (1 if self.setup.enable_chunked_prefill else request.remaining())
        spare = len(self.running) - len(leaving)
        for g, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            held = [prefix for r in leaving for prefix in r.tables[g] if prefix is not None]
            freed = held.count(PRIVATE)
            for prefix in set(held) - {PRIVATE}:
                freed += pool.holders[prefix] == held.count(prefix) and prefix not in pool.busy
            missing = -(-(end if window else request.num_tokens()) // size) - len(request.tables[g])
            if missing > 0 and missing + spare > pool.num_available() + freed:
                return False
        return True

    def displace(self, leaving: list[NaiveRequest]) -> bool:
        """Send requests back to wait, unless a step in progress has one of them."""
        self.must_commit = any(map(self.is_in_progress, leaving))
        if self.must_commit:
            return False
        for request in leaving:
            self.take_out(request)
            request.displaced_len = len(request.tokens)
            self.num_displaced[request.service_class] += 1
            self.displaced.append(request)
            self.preempt(request)
        return bool(leaving)

    def is_in_progress(self, request: NaiveRequest) -> bool:
        """Return whether a step has the request that was planned before this one."""
        return request.scheduled > sum(n for request_id, _, n in self.plan.rows if request_id == request.id)

    def take_out(self, request: NaiveRequest) -> None:
        for i, (request_id, _, n) in enumerate(self.plan.rows):
            if request_id == request.id:
                del self.plan.rows[i], self.plan.drafts[i]
                request.unknown -= self.plan.samples.pop(i)
                request.scheduled -= n
                request.in_step = False
                self.budget += n
                return

    def preempt(self, request: NaiveRequest) -> None:
        self.leave(request)
        self.wait(request)
        self.preempted.append(request.id)
        self.num_preemptions += 1

    def add_drafts(self) -> None:
        """Lengthen rows that end with their request's last known token, with what nobody else wants."""
        size = self.setup.block_size
        for i, (request_id, begin, n) in enumerate(self.plan.rows):
            [request] = [r for r in self.running if r.id == request_id]
            end = begin + n
            most = min(self.budget, self.setup.max_num_seqs - sum(self.plan.samples) - sum(map(len, self.plan.drafts)))
            wanted = min(len(request.draft), most, request.last_len - len(request.tokens) - 1)
            if end != len(request.tokens) or wanted <= 0:
                continue
            missing = [-(-(end + wanted) // size) - len(table) for table in request.tables]
            room = [pool.num_free() - len(self.running) for pool in self.pools]
            if any(count > max(0, free) for count, free in zip(missing, room, strict=True)):
                wanted = min(wanted, min(len(table) for table in request.tables) * size - end)
            if wanted <= 0:
                continue
            self.plan.rows[i] = (request_id, begin, n + wanted)
            self.plan.drafts[i] = request.draft[:wanted]
            assert self.extend(request, wanted, spare=0)
            request.scheduled += wanted
            request.drafting = True
            self.budget -= wanted

    def put(self, request: NaiveRequest, n: int) -> None:
        self.plan.rows.append((request.id, request.computed + request.scheduled, n))
        self.plan.samples.append(n == request.remaining())
        self.plan.drafts.append([])
        request.unknown += n == request.remaining()
        request.scheduled += n
        request.in_step = True
        self.budget -= n

    def extend(self, request: NaiveRequest, n: int, spare: int) -> bool:
        missing = self.missing(request, n)
        if any(
            count > 0 and count + spare > pool.num_available() for pool, count in zip(self.pools, missing, strict=True)
        ):
            return False
        for g, (pool, table, count) in enumerate(zip(self.pools, request.tables, missing, strict=True)):
            for _ in range(count):
                if pool.num_free() == 0:
                    self.evict(g, pool.evictable()[0])
                pool.num_private += 1
                table.append(PRIVATE)
        return True

    def missing(self, request: NaiveRequest, n: int) -> list[int]:
        """Return how many blocks a request lacks in each group for its next `n` tokens; below 0: it has more."""
        chunk_end = request.computed + request.scheduled + n
        ends = [chunk_end if window else max(request.num_tokens(), chunk_end) for window in self.windows]
        return [-(-end // self.setup.block_size) - len(table) for end, table in zip(ends, request.tables, strict=True)]

    def fit(self, request: NaiveRequest, n: int, spare: int) -> int:
        """Extend a request by as many of `n` tokens as there is room for, and return how many; 0: there is none."""
        for fitting in range(n, 0, -1) if self.setup.enable_chunked_prefill else [n]:
            if self.extend(request, fitting, spare):
                return fitting
        return 0

    def make_room(self, request: NaiveRequest, n: int) -> int:
        request.awaits_loads = False
        while not (fitting := self.fit(request, n, spare=0)):
            victim = self.running[-1]
            self.must_commit = self.is_in_progress(victim)
            if self.must_commit or victim.begun >= self.num_begun_before:
                return 0
            if victim is request and self.must_await_loads(request, n):
                request.awaits_loads = True
                return 0
            if len(self.running) == 1 and self.give_way():
                continue
            self.take_out(victim)
            self.preempt(victim)
            if victim is request:
                return 0
        return fitting

    def must_await_loads(self, request: NaiveRequest, n: int) -> bool:
        """Return whether a request would begin anew in vain: it lacks no more blocks than are loading."""
        if not request.skip_prefix_match or not any(pool.num_loading() for pool in self.pools):
            return False
        least = 1 if self.setup.enable_chunked_prefill else n
        return all(
            count <= pool.num_available() + pool.num_loading()
            for pool, count in zip(self.pools, self.missing(request, least), strict=True)
        )

    # ---- commit ----

    def commit(self, sampled: dict[int, list[int]]) -> None:
        """`sampled` by request id: a token behind the last one of its row that is not drafted, and one behind each that
        is; below 0 if there is no token. Requests that have ended since are passed over.
        """
        plan = self.open.pop(0)
        for (request_id, _, n), samples, draft in zip(plan.rows, plan.samples, plan.drafts, strict=True):
            for request in [r for r in self.running if r.id == request_id]:
                self.commit_row(request, n, sampled[request_id] if samples else [], draft)
        self.num_settled += 1
        for pool in self.pools:
            pool.settle(self.num_settled)

    def commit_row(self, request: NaiveRequest, n: int, sampled: list[int], draft: list[int]) -> None:
        tokens = [token for i, token in enumerate(sampled) if sampled[:i] == draft[:i]]
        num_before, has_ended = len(request.tokens), False
        for i, token in enumerate(tokens):
            self.shares.charge(request.flow, ANSWER)
            if token < 0:
                self.leave(request)
                return
            has_ended = self.append(request, token)
            request.computed += i > 0
            if has_ended:
                break
        request.scheduled -= n
        request.unknown -= bool(sampled)
        request.drafting = request.drafting and not draft
        request.computed += n - len(draft)
        self.enter_index(request)
        if len(request.tokens) - num_before < len(sampled):
            self.trim(request)
        self.leave_window(request)
        if has_ended:
            self.leave(request)

    def trim(self, request: NaiveRequest) -> None:
        """Free the blocks in which only drafted tokens lie."""
        for pool, table in zip(self.pools, request.tables, strict=True):
            while len(table) > -(-request.computed // self.setup.block_size):
                assert table.pop() == PRIVATE
                self.let_go(pool, PRIVATE)

    def let_go(self, pool: NaivePool, prefix: Prefix) -> None:
        """Free the request's blocks, unless the next step was planned with them."""
        if self.open:
            pool.retire(prefix, self.num_planned)
        else:
            pool.drop(prefix)

    def enter_index(self, request: NaiveRequest) -> None:
        if not self.setup.enable_prefix_caching:
            return
        num_before = self.num_committed(request)
        for i in range(request.computed // self.setup.block_size):
            prefix = request.prefix((i + 1) * self.setup.block_size)
            for g, (pool, table) in enumerate(zip(self.pools, request.tables, strict=True)):
                if table[i] != PRIVATE:
                    continue
                pool.forget_load(prefix)
                if prefix in pool.holders:
                    pool.hold(prefix)
                    self.let_go(pool, PRIVATE)
                else:
                    pool.num_private -= 1
                    pool.holders[prefix] = 1
                    if self.windows[g]:
                        pool.worths[prefix] = self.boundaries.worth(g, prefix)
                table[i] = prefix
        self.keep_boundaries(request, num_before, self.num_committed(request))

    def num_committed(self, request: NaiveRequest) -> int:
        if not self.setup.enable_prefix_caching:
            return 0
        [length] = {sum(block != PRIVATE for block in table) for table in request.tables}
        return length

    def leave_window(self, request: NaiveRequest) -> None:
        """Keep the tail of the last full block, and one block more: an equal prompt may use no more than that."""
        num_full = request.computed // self.setup.block_size
        for pool, window, table in zip(self.pools, self.windows, request.tables, strict=True):
            for i in range(num_full - self.tail(window) - 1 if window else 0):
                prefix, table[i] = table[i], None
                if prefix is not None:
                    self.let_go(pool, prefix)

    def append(self, request: NaiveRequest, token: int) -> bool:
        """Return whether the request ends with the token."""
        request.tokens.append(token)
        request.draft = []
        enough = len(request.tokens) - request.prompt_len >= request.min_tokens
        return len(request.tokens) >= request.last_len or (enough and token in request.stop)

    def reset_prefix_cache(self) -> None:
        for g, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            while pool.evictable():
                self.evict(g, pool.evictable()[0])
            for prefix in list(pool.loading):
                for other in self.pools if window == 0 else [pool]:
                    other.forget_load(prefix)
                self.lose(prefix, g)
