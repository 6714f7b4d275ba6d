"""The accounts by which engines share cores, in virtual time: against a naive model, and their promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_accounts import NaiveShares

_cpu = pytest.importorskip("swiftkv._cpu")

MS = 1_000_000


@dataclass
class Engine:
    """Computes whenever it may; with `busy_ms` only for so long at the beginning of every `period_ms`."""

    threads: int
    weight: float = 1.0
    max_share: float = 1.0
    period_ms: int = 0
    busy_ms: int = 0
    is_whole: bool = False
    is_dead: bool = False
    wants: bool = False
    cores: int = 0  # that it may compute on
    left_ms: float = 0.0  # of core time that it still wants in this period
    waited_ms: int = 0  # in one go
    longest_wait_ms: int = 0
    core_ms: list[float] = field(default_factory=list)  # in each millisecond


class Node:
    """Engines on cores that are divided evenly between the threads that compute; they ask every millisecond."""

    def __init__(self, num_cores: int, *engines: Engine) -> None:
        self.num_cores = num_cores
        self.engines = engines
        self.shares = _cpu.Shares(num_cores)
        self.now_ms = 0
        for number, engine in enumerate(engines):
            self.shares.open(number, engine.threads, engine.weight, engine.max_share, engine.is_whole)

    def run(self, duration_ms: int) -> None:
        for _ in range(duration_ms):
            self._tick()

    def _tick(self) -> None:
        self.now_ms += 1
        living = [(number, engine) for number, engine in enumerate(self.engines) if not engine.is_dead]
        for number, engine in living:
            self._come_or_go(number, engine)
        wanting = [(number, engine) for number, engine in living if engine.wants]
        for _, engine in wanting:
            engine.cores = 0
        for number, engine in [*wanting, *wanting]:  # who stops wakes others, which ask at once
            engine.cores, _ = self.shares.ask(number, self.now_ms * MS)
        for number, engine in wanting:
            self._count_wait(number, engine)
        taken = sum(engine.cores for _, engine in wanting)
        for number, engine in wanting:
            core_ms = engine.cores * min(1.0, self.num_cores / taken) if taken else 0.0
            engine.core_ms.append(core_ms)
            engine.left_ms -= core_ms
            if core_ms:
                self.shares.charge(number, int(core_ms * MS))

    def _come_or_go(self, number: int, engine: Engine) -> None:
        if engine.period_ms and self.now_ms % engine.period_ms == 0:
            engine.left_ms += engine.busy_ms * min(engine.threads, self.num_cores)
        wants = not engine.period_ms or engine.left_ms > 0
        if wants and not engine.wants:
            self.shares.begin(number, self.now_ms * MS)
        elif engine.wants and not wants:
            self.shares.end(number)
        engine.wants = wants

    def _count_wait(self, number: int, engine: Engine) -> None:
        engine.waited_ms = 0 if engine.cores else engine.waited_ms + 1
        engine.longest_wait_ms = max(engine.longest_wait_ms, engine.waited_ms)
        if engine.waited_ms * MS >= _cpu.LONGEST_WAIT_NS:
            engine.cores = self.shares.forgive(number)


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("begin", "end", "charge", "ask", "ask", "ask", "forgive")),
        st.integers(0, 3),
        st.integers(0, 200 * MS),  # time that passes before, or core time that is charged
    ),
    max_size=60,
)
ACCOUNTS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 100), st.sampled_from((1.0, 1.0, 0.5, 0.05)), st.booleans()),
    min_size=4,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(num_cores=st.integers(1, 4), accounts=ACCOUNTS, operations=OPERATIONS)
def test_answers_are_those_of_a_naive_model(
    num_cores: int, accounts: list[tuple[int, int, float, bool]], operations: list[tuple[str, int, int]]
) -> None:
    real, naive = _cpu.Shares(num_cores), NaiveShares(num_cores)
    both: tuple[Any, ...] = (real, naive)
    for number, account in enumerate(accounts):
        for shares in both:
            shares.open(number, *account)
    now_ns = 0
    for what, number, amount_ns in operations:
        arguments = {"charge": [amount_ns], "end": [], "forgive": []}.get(what)
        if arguments is None:
            now_ns += amount_ns
            arguments = [now_ns]
        answers = [getattr(shares, what)(number, *arguments) for shares in both]
        assert answers[0] == answers[1], (what, number)
        for other in range(len(accounts)):
            assert real.clock_ns(other) == pytest.approx(naive.clock_ns(other), rel=1e-12)


@settings(max_examples=15, deadline=None)
@given(num_cores=st.integers(1, 8), weights=st.lists(st.integers(1, 20), min_size=2, max_size=4))
def test_engines_with_enough_work_have_their_weights(num_cores: int, weights: list[int]) -> None:
    engines = [Engine(num_cores, weight) for weight in weights]
    node = Node(num_cores, *engines)
    node.run(1500)
    served = [sum(engine.core_ms) / engine.weight for engine in engines]
    unfair_ms = _cpu.LEAD_NS / MS + num_cores * (_cpu.TURN_NS / MS + 1)  # with a turn, and what is charged at once
    for i, mine in enumerate(served):
        for j, other in enumerate(served):
            assert abs(mine - other) <= unfair_ms * (1 / weights[i] + 1 / weights[j]) + 1e-6
    assert sum(map(sum, (engine.core_ms for engine in engines))) == pytest.approx(1500 * num_cores, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    num_cores=st.integers(1, 4),
    engines=st.lists(
        st.builds(
            Engine,
            threads=st.integers(1, 4),
            weight=st.integers(1, 100),
            is_whole=st.booleans(),
            period_ms=st.sampled_from((0, 7, 50)),
            busy_ms=st.integers(1, 30),
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_no_core_is_idle_while_somebody_waits(num_cores: int, engines: list[Engine]) -> None:
    node = Node(num_cores, *engines)
    for _ in range(300):
        node.run(1)
        wanted = sum(engine.threads for engine in engines if engine.wants)
        taken = sum(engine.cores for engine in engines if engine.wants)
        assert taken >= min(num_cores, wanted)


@pytest.mark.parametrize(
    ("num_cores", "engines", "cores"),
    [
        (2, [(2, 1), (2, 1)], [1, 1]),
        (8, [(8, 3), (8, 1)], [6, 2]),
        (4, [(1, 100), (4, 2), (4, 1)], [1, 2, 1]),
        (4, [(4, 1), (4, 1), (4, 1), (4, 1)], [1, 1, 1, 1]),
        (3, [(3, 1)], [3]),
    ],
)
def test_engines_whose_parts_are_whole_cores_have_them_at_once_and_never_wait(
    num_cores: int, engines: list[tuple[int, int]], cores: list[int]
) -> None:
    node = Node(num_cores, *(Engine(threads, weight) for threads, weight in engines))
    for _ in range(100):
        node.run(1)
        assert [engine.cores for engine in node.engines] == cores


def test_who_is_due_half_a_core_shares_one_and_stands_still_for_no_more_than_two_turns() -> None:
    heavy, light = Engine(2, 3), Engine(2, 1)
    node = Node(2, heavy, light)
    node.run(2000)
    assert heavy.longest_wait_ms == 0 < light.longest_wait_ms <= 2 * _cpu.TURN_NS / MS
    assert sum(light.core_ms) == pytest.approx(1000, abs=40)


def test_nobody_falls_behind_for_good_beside_many_that_weigh_little() -> None:
    """Those share a core beside the others only while nobody is far behind."""
    node = Node(4, Engine(4, 11), Engine(4, 16), Engine(4, 4), Engine(4, 1))
    node.run(6000)
    assert [sum(engine.core_ms) for engine in node.engines] == [
        pytest.approx(24_000 * engine.weight / 32, abs=50) for engine in node.engines
    ]


def test_where_all_weigh_the_same_nobody_stands_still() -> None:
    node = Node(2, *(Engine(2) for _ in range(5)))
    node.run(2000)
    assert [engine.longest_wait_ms for engine in node.engines] == [0] * 5
    assert [sum(engine.core_ms) for engine in node.engines] == [pytest.approx(800, abs=20)] * 5


def test_an_engine_that_takes_all_of_its_cores_or_none_has_its_share_too() -> None:
    whole, other = Engine(2, is_whole=True), Engine(2)
    node = Node(2, whole, other)
    node.run(2000)
    assert sum(whole.core_ms) == pytest.approx(2000, abs=100)
    assert sum(other.core_ms) == pytest.approx(2000, abs=100)


@pytest.mark.parametrize(
    ("weights", "steps_ms"), [((1, 1), (100, 5)), ((3, 1), (20, 20)), ((1, 3), (60, 5)), ((3, 1, 1), (5, 60, 20))]
)
def test_a_gpu_is_divided_by_weight_however_long_steps_take(
    weights: tuple[int, ...], steps_ms: tuple[int, ...]
) -> None:
    gpu, engines = _cpu.Shares(1), range(len(weights))
    for engine in engines:
        gpu.open(engine, 1, weights[engine], 1.0, is_whole=True, unasked_ns=_cpu.LONGEST_WAIT_NS)
        gpu.begin(engine, 0)
    now_ms, took_ms, owner = 0, [0] * len(weights), 0
    while now_ms < 60_000:
        granted = {engine: gpu.ask(engine, now_ms * MS)[0] for engine in (owner, *engines)}
        (owner,) = [engine for engine in engines if granted[engine]]
        now_ms += steps_ms[owner]
        took_ms[owner] += steps_ms[owner]
        gpu.charge(owner, steps_ms[owner] * MS)
    for engine in engines:
        assert took_ms[engine] == pytest.approx(now_ms * weights[engine] / sum(weights), rel=0.03)


def test_who_takes_less_than_its_share_never_waits() -> None:
    flood, light = Engine(2), Engine(2, period_ms=100, busy_ms=40)
    node = Node(2, flood, light)
    node.run(4999)
    assert light.longest_wait_ms == 0
    assert sum(light.core_ms) == pytest.approx(49 * 80)
    assert sum(flood.core_ms) == pytest.approx(2 * 4999 - 49 * 80)


def test_rest_saves_up_no_more_than_the_credit() -> None:
    flood, guest = Engine(2), Engine(2, period_ms=20_000, busy_ms=20_000)
    node = Node(2, flood, guest)
    node.run(19_999)
    flood.longest_wait_ms = 0
    node.run(2000)
    assert flood.longest_wait_ms <= (_cpu.CREDIT_NS + 2 * _cpu.TURN_NS) / MS + 2
    assert sum(flood.core_ms[-1000:]) == pytest.approx(1000, abs=50)


def test_nobody_pays_for_cores_that_were_idle() -> None:
    """Two computed beside each other, one of them on a core that was its alone; then a third comes for all cores."""
    small, heavy, guest = Engine(1, 1), Engine(1, 100), Engine(2, 1, period_ms=30_000, busy_ms=30_000)
    node = Node(2, small, heavy, guest)
    node.run(29_999)
    assert sum(small.core_ms) == sum(heavy.core_ms) == 29_999
    node.run(4000)
    assert small.longest_wait_ms < _cpu.LONGEST_WAIT_NS / MS


@pytest.mark.parametrize("max_share", [0.05, 0.3, 0.9])
@pytest.mark.parametrize("num_others", [0, 1])
def test_nobody_takes_more_than_its_most(max_share: float, num_others: int) -> None:
    capped = Engine(4, 100, max_share)
    node = Node(4, capped, *(Engine(4) for _ in range(num_others)))
    node.run(4000)
    window_ms, burst_ms, tick_ms = 1000, 100, 1
    rate = 4 * max_share
    for start in range(0, len(capped.core_ms) - window_ms, 50):
        taken = sum(capped.core_ms[start : start + window_ms])
        assert taken <= rate * (window_ms + burst_ms) + 4 * tick_ms
    assert sum(capped.core_ms[-window_ms:]) >= 0.9 * rate * window_ms - 4


@pytest.mark.parametrize("dies_computing", [True, False])
def test_the_dead_hold_nobody_up(dies_computing: bool) -> None:
    heavy, light = Engine(2, 3), Engine(2, 1)
    node = Node(2, heavy, light)
    while light.waited_ms == 0:
        node.run(1)
    dead, alive = (heavy, light) if dies_computing else (light, heavy)
    dead.is_dead = True
    alive.longest_wait_ms = alive.waited_ms = 0
    node.run(1000)
    assert alive.longest_wait_ms <= _cpu.ABSENT_NS / MS + 1
    assert sum(alive.core_ms[-800:]) == 2 * 800


def test_who_has_waited_long_computes_for_a_turn() -> None:
    light, heavy = Engine(1, 1), Engine(1, 10_000)
    node = Node(1, light, heavy)
    node.run(10_000)
    assert light.longest_wait_ms * MS <= _cpu.LONGEST_WAIT_NS
    assert sum(light.core_ms) >= 9 * _cpu.TURN_NS / MS


@pytest.mark.parametrize(
    ("account", "threads", "weight", "max_share"),
    [(-1, 1, 1, 1), (63, 1, 1, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, -1, 1), (0, 1, 1, 0), (0, 1, 1, 1.1)],
)
def test_shares_that_make_no_sense_are_refused(account: int, threads: int, weight: float, max_share: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        _cpu.Shares(2).open(account, threads, weight, max_share)
