"""Storage under any order of events: blocks go down and come up, in part or not at all, and every read is right."""

from __future__ import annotations

from host_oracle import HostEngine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from naive_scheduler import Setup
from storage_oracle import StorageEngine

TOKENS = st.integers(0, 2)
SETUPS = [
    (Setup(((2, 12, 0),), 2, 4, 16, 24), 0),
    (Setup(((2, 12, 0),), 2, 4, 16, 24), 3),
    (Setup(((1, 14, 0), (2, 9, 5)), 2, 4, 8, 24), 0),
    (Setup(((1, 14, 0), (2, 9, 5)), 2, 4, 8, 24, retention_interval=6), 2),
    (Setup(((1, 8, 4), (2, 14, 0), (1, 9, 9)), 2, 4, 8, 24), 0),
    (Setup(((3, 9, 5),), 2, 4, 8, 24), 0),
    (Setup(((1, 14, 0), (1, 14, 0)), 2, 4, 8, 24), 0),
    (Setup(((2, 30, 0),), 2, 4, 6, 24), 0),
    (Setup(((1, 30, 0), (1, 10, 5)), 2, 4, 8, 24, blocks_per_extent=(3, 1)), 0),
    (Setup(((2, 22, 0), (1, 33, 5)), 2, 4, 8, 24, retention_interval=6, blocks_per_extent=(2, 3)), 0),
]
POLICIES = ["write_through", "write_through_selective", "write_back"]


class Storage(RuleBasedStateMachine):
    engine: StorageEngine

    @initialize(pick=st.sampled_from(SETUPS), policy=st.sampled_from(POLICIES), num_chunks=st.sampled_from([0, 4, 14]))
    def start(self, pick: tuple[Setup, int], policy: str, num_chunks: int) -> None:
        setup, num_lent = pick
        self.can_lend = num_lent > 0
        has_full_attention = any(window == 0 for _, _, window in setup.groups)
        if num_chunks and has_full_attention:
            self.engine = HostEngine(setup, policy, num_chunks, num_lent)
        else:
            self.engine = StorageEngine(setup, policy, num_lent)
        self.next_id = 0
        self.history: list[list[int]] = [[0, 1] * 10]

    @rule(
        source=st.integers(0, 99),
        keep=st.integers(0, 22),
        tail=st.lists(TOKENS, min_size=1, max_size=6),
        max_tokens=st.integers(1, 6),
        namespace=st.sampled_from([b"a", b"a", b"a", b"b"]),
        is_held=st.booleans(),
    )
    def add(self, source: int, keep: int, tail: list[int], max_tokens: int, namespace: bytes, is_held: bool) -> None:
        prompt = (self.history[source % len(self.history)][:keep] + tail)[: self.engine.setup.max_model_len - 1]
        add = self.engine.add_held if is_held else self.engine.add
        add(self.next_id, prompt, max_tokens, namespace=namespace)
        self.history.append(prompt)
        self.next_id += 1

    @precondition(lambda self: len(self.engine.plans) < 2)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.plans)
    @rule(is_stored=st.booleans())
    def commit(self, is_stored: bool) -> None:
        self.history.extend(list(request.tokens) for request in self.engine.requests.values())
        self.engine.commit()
        if is_stored:
            self.engine.store()

    @precondition(lambda self: not self.engine.plans)
    @rule(steps=st.integers(1, 12), max_blocks=st.integers(0, 40))
    def run(self, steps: int, max_blocks: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self.engine.store(max_blocks)

    @precondition(lambda self: len(self.engine.plans) < 2)
    @rule(steps=st.integers(1, 12))
    def run_ahead(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step_ahead()
            self.engine.store()

    @precondition(lambda self: self.engine.held)
    @rule(pick=st.integers(0, 99), max_blocks=st.integers(1, 30))
    def begin_load(self, pick: int, max_blocks: int) -> None:
        self.engine.begin_load(self._held(pick), max_blocks)

    @precondition(lambda self: self.engine.held and self.engine.scheduler.can_meet)
    @rule(pick=st.integers(0, 99), first=st.integers(0, 11), max_blocks=st.integers(1, 30))
    def meet(self, pick: int, first: int, max_blocks: int) -> None:
        self.engine.meet(self._held(pick), first, max_blocks)

    @precondition(lambda self: self.engine.transfers)
    @rule(pick=st.integers(0, 99), num_blocks=st.integers(1, 8), is_loaded=st.booleans())
    def read(self, pick: int, num_blocks: int, is_loaded: bool) -> None:
        self.engine.read(self.engine.transfers[pick % len(self.engine.transfers)], num_blocks, is_loaded)

    @precondition(lambda self: self.engine.transfers)
    @rule(pick=st.integers(0, 99))
    def read_all(self, pick: int) -> None:
        transfer = self.engine.transfers[pick % len(self.engine.transfers)]
        self.engine.read(transfer, len(transfer.blocks))

    @precondition(lambda self: any(not transfer.is_forgotten for transfer in self.engine.transfers))
    @rule(pick=st.integers(0, 99))
    def give_up(self, pick: int) -> None:
        waited_for = [transfer for transfer in self.engine.transfers if not transfer.is_forgotten]
        self.engine.give_up(waited_for[pick % len(waited_for)])

    @precondition(lambda self: self.engine.held)
    @rule(pick=st.integers(0, 99))
    def let_go(self, pick: int) -> None:
        self.engine.let_go(self._held(pick))

    @precondition(lambda self: self.engine.requests)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        ids = sorted(self.engine.requests)
        self.engine.abort(ids[pick % len(ids)])

    @precondition(lambda self: self.engine.storage)
    @rule(pick=st.integers(0, 999))
    def storage_forgets(self, pick: int) -> None:
        names = list(self.engine.storage)
        del self.engine.storage[names[pick % len(names)]]

    @precondition(lambda self: isinstance(self.engine, HostEngine))
    @rule(pick=st.integers(0, 99))
    def host_forgets(self, pick: int) -> None:
        assert isinstance(self.engine, HostEngine)
        self.engine.host_forgets(pick)

    @precondition(lambda self: isinstance(self.engine, HostEngine))
    @rule()
    def evict_host(self) -> None:
        self.engine.scheduler.evict_host()

    @rule()
    def reset(self) -> None:
        self.engine.reset_prefix_cache()

    @precondition(lambda self: self.can_lend)
    @rule(num_extents=st.integers(1, 3))
    def lend(self, num_extents: int) -> None:
        if not self.engine.plans:
            self.engine.lend(num_extents)

    @precondition(lambda self: self.can_lend)
    @rule()
    def take_back(self) -> None:
        self.engine.take_back()

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()
            self.engine.check()

    def _held(self, pick: int) -> int:
        held = sorted(self.engine.held)
        return held[pick % len(held)]


TestStorage = Storage.TestCase
TestStorage.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
