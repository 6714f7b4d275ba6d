"""The accounts of engines that share cores, written down as plainly as can be: the oracle of `_cpu.Shares`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from swiftkv._cpu import ABSENT_NS, CREDIT_NS, LEAD_NS, LONGEST_WAIT_NS, TURN_NS

ASK_AGAIN_NS = TURN_NS // 4
FORGOTTEN_NS = 10_000_000_000
BURST_NS = 0.1e9


@dataclass(eq=False)
class NaiveAccount:
    threads: int
    weight: float
    max_share: float
    is_whole: bool
    clock_ns: float
    seen_ns: int = 0
    wants: bool = False
    cores: int = 0
    is_alone: bool = False
    allowance_ns: float = 0.0
    allowed_at_ns: int = 0


class NaiveShares:
    def __init__(self, num_cores: int) -> None:
        self.num_cores = num_cores
        self.table_ns = 0.0
        self.accounts: dict[int, NaiveAccount] = {}

    def open(self, slot: int, threads: int, weight: float, max_share: float, is_whole: bool) -> None:
        most = threads if is_whole else min(threads, math.ceil(max_share * self.num_cores))
        self.accounts[slot] = NaiveAccount(most, weight, max_share, is_whole, self.table_ns)

    def begin(self, slot: int, now_ns: int) -> None:
        account = self.accounts[slot]
        account.seen_ns = now_ns
        account.is_alone = False
        self._clamp(account)
        account.wants = True

    def end(self, slot: int) -> None:
        self.accounts[slot].wants = False
        self.accounts[slot].cores = 0

    def charge(self, slot: int, core_ns: int) -> None:
        account = self.accounts[slot]
        account.allowance_ns -= core_ns
        account.clock_ns += core_ns / account.weight
        others = [] if account.is_alone else self._others(slot, account.seen_ns)
        self.table_ns = max(self.table_ns, min([account.clock_ns, *(other.clock_ns for _, other in others)]))

    def ask(self, slot: int, now_ns: int) -> tuple[int, int]:
        account = self.accounts[slot]
        account.seen_ns = now_ns
        if account.max_share < 1:
            rate = account.max_share * self.num_cores
            saved_ns = account.allowance_ns + rate * (now_ns - account.allowed_at_ns)
            account.allowed_at_ns = now_ns
            account.allowance_ns = min(max(saved_ns, -rate * LONGEST_WAIT_NS), rate * BURST_NS)
            if account.allowance_ns < 0:
                self.end(slot)
                return 0, min(1 + int(-account.allowance_ns / rate), ASK_AGAIN_NS)
        self._clamp(account)
        account.wants = True
        account.cores = self._choose(slot, now_ns)
        return account.cores, 0 if account.cores else ASK_AGAIN_NS

    def forgive(self, slot: int) -> int:
        account = self.accounts[slot]
        ranks = [self._rank(other) for _, other in self._others(slot, account.seen_ns)]
        account.clock_ns = min([account.clock_ns, *ranks]) - 1
        account.wants = True
        account.cores = self._choose(slot, account.seen_ns)
        return account.cores

    def clock_ns(self, slot: int) -> float:
        return self.accounts[slot].clock_ns

    def _others(self, slot: int, now_ns: int) -> list[tuple[int, NaiveAccount]]:
        there = []
        for number, other in self.accounts.items():
            if number == slot or not other.wants:
                continue
            if now_ns - other.seen_ns <= ABSENT_NS:
                there.append((number, other))
            elif now_ns - other.seen_ns > FORGOTTEN_NS:
                other.wants = False
        return there

    def _choose(self, slot: int, now_ns: int) -> int:
        """Let all that want cores choose in the order of their ranks, and return what this one gets."""
        mine = self.accounts[slot]
        there = [(slot, mine), *self._others(slot, now_ns)]
        mine.is_alone = len(there) == 1
        there.sort(key=lambda one: (self._rank(one[1]), one[0]))
        due = self._due([account for _, account in there])
        has = {number: 0 for number, _ in there}
        for number, account in there:
            left = max(0, self.num_cores - sum(has.values()))
            if not account.is_whole:
                has[number] = max(0, min(left, math.ceil(due[id(account)])))
            elif left == self.num_cores or account.threads <= left:
                has[number] = account.threads
        for number, account in there:
            left = max(0, self.num_cores - sum(has.values()))
            if not account.is_whole:
                has[number] += min(left, account.threads - has[number])
        for number, account in there:
            if has[number] == 0 and sum(has.values()) < self.num_cores:
                has[number] = account.threads
        last = min((account for _, account in there), key=lambda account: account.clock_ns)
        for number, account in there:
            lead_ns = LEAD_NS / max(account.weight, last.weight)
            if has[number] == 0 and not account.is_whole and account.clock_ns <= last.clock_ns + lead_ns:
                has[number] = 1
        return has[slot]

    def _due(self, accounts: list[NaiveAccount]) -> dict[int, Fraction]:
        """Return the part of the cores that each account is due by weight, none more than it has threads."""
        due: dict[int, Fraction] = {}
        left, sharing = Fraction(self.num_cores), list(accounts)
        while sharing:
            weight = sum(Fraction(account.weight) for account in sharing)
            met = [account for account in sharing if left * Fraction(account.weight) / weight >= account.threads]
            for account in met or sharing:
                due[id(account)] = Fraction(account.threads) if met else left * Fraction(account.weight) / weight
            left -= sum(account.threads for account in met)
            sharing = [account for account in sharing if account not in met] if met else []
        return due

    def _clamp(self, account: NaiveAccount) -> None:
        credit_ns = CREDIT_NS * self.num_cores / account.weight
        most_ns = self.table_ns + credit_ns + 2 * self._turn_ns(account)
        account.clock_ns = min(max(account.clock_ns, self.table_ns - credit_ns), most_ns)

    def _turn_ns(self, account: NaiveAccount) -> float:
        return TURN_NS * account.cores / account.weight

    def _rank(self, account: NaiveAccount) -> float:
        return account.clock_ns - self._turn_ns(account)
