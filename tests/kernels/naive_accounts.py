"""The accounts of engines that share cores, written down as plainly as can be: the oracle of `_cpu.Shares`."""

from __future__ import annotations

from dataclasses import dataclass

from swiftkv._cpu import ABSENT_NS, CREDIT_NS, LONGEST_WAIT_NS, TURN_NS

ASK_AGAIN_NS = ABSENT_NS // 4
FORGOTTEN_NS = 10_000_000_000
BURST_NS = 0.1e9


@dataclass
class NaiveAccount:
    threads: int
    weight: float
    max_share: float
    clock_ns: float
    seen_ns: int = 0
    wants: bool = False
    computes: bool = False
    is_alone: bool = False
    allowance_ns: float = 0.0
    allowed_at_ns: int = 0


class NaiveShares:
    def __init__(self, num_cores: int) -> None:
        self.num_cores = num_cores
        self.table_ns = 0.0
        self.accounts: dict[int, NaiveAccount] = {}

    def open(self, slot: int, threads: int, weight: float, max_share: float) -> None:
        self.accounts[slot] = NaiveAccount(threads, weight, max_share, self.table_ns)

    def begin(self, slot: int, now_ns: int) -> None:
        account = self.accounts[slot]
        account.seen_ns = now_ns
        account.is_alone = False
        self._clamp(account)
        account.wants = True

    def end(self, slot: int) -> None:
        self.accounts[slot].wants = self.accounts[slot].computes = False

    def charge(self, slot: int, core_ns: int) -> None:
        account = self.accounts[slot]
        account.allowance_ns -= core_ns
        account.clock_ns += core_ns / account.weight
        others = [] if account.is_alone else self._others(slot, account.seen_ns)
        self.table_ns = max(self.table_ns, min([account.clock_ns, *(other.clock_ns for _, other in others)]))

    def ask(self, slot: int, now_ns: int) -> int:
        account = self.accounts[slot]
        account.seen_ns = now_ns
        if account.max_share < 1:
            rate = account.max_share * self.num_cores
            saved_ns = account.allowance_ns + rate * (now_ns - account.allowed_at_ns)
            account.allowed_at_ns = now_ns
            account.allowance_ns = min(max(saved_ns, -rate * LONGEST_WAIT_NS), rate * BURST_NS)
            if account.allowance_ns < 0:
                self.end(slot)
                return min(1 + int(-account.allowance_ns / rate), ASK_AGAIN_NS)
        self._clamp(account)
        account.wants = True
        others = self._others(slot, now_ns)
        account.is_alone = not others
        mine = (self._rank(account), slot)
        taken = sum(other.threads for number, other in others if (self._rank(other), number) < mine)
        account.computes = taken < self.num_cores
        return 0 if account.computes else ASK_AGAIN_NS

    def forgive(self, slot: int) -> None:
        account = self.accounts[slot]
        clocks = [other.clock_ns - self._turn_ns(other) for _, other in self._others(slot, account.seen_ns)]
        account.clock_ns = min([account.clock_ns, *clocks]) - 1
        account.wants = account.computes = True

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

    def _clamp(self, account: NaiveAccount) -> None:
        credit_ns = CREDIT_NS * self.num_cores / account.weight
        most_ns = self.table_ns + credit_ns + (2 * self._turn_ns(account) if account.computes else 0.0)
        account.clock_ns = min(max(account.clock_ns, self.table_ns - credit_ns), most_ns)

    def _turn_ns(self, account: NaiveAccount) -> float:
        return TURN_NS * min(account.threads, self.num_cores) / account.weight

    def _rank(self, account: NaiveAccount) -> float:
        return account.clock_ns - (self._turn_ns(account) if account.computes else 0.0)
