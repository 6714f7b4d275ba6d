"""The work ahead of a prompt that arrives, in plain Python: the model that `_core.PromptQueue` is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from swiftkv._core import PRIORITIES_PER_CLASS
from swiftkv.policies import SchedulingPolicy

RECENT = 512
MAX_OVERTAKING_PART = 0.9


@dataclass
class Prompt:
    """A prompt, as `_core.QueuedPrompt` has it."""

    num_tokens: int
    num_left: int
    arrived_s: float
    priority: int = 0
    deadline_s: float = 0.0
    flow: int = 0
    flow_weight: float = 1.0
    num_coming: int = 0
    has_begun: bool = False
    done_s: float = 0.0

    @property
    def num_computed(self) -> int:
        return self.num_left - self.num_coming

    @property
    def pairs(self) -> float:
        return self.num_computed * (self.num_tokens - 0.5 * self.num_computed)


@dataclass
class Pace:
    token_s: float
    pair_s: float
    overhead_s: float
    spare_s: float
    budget: float

    @property
    def step_s(self) -> float:
        return self.overhead_s + min(self.spare_s, self.budget * self.token_s)

    def work_s(self, prompt: Prompt) -> float:
        return self.token_s * prompt.num_computed + self.pair_s * prompt.pairs

    def steps(self, prompt: Prompt) -> float:
        return max(prompt.num_computed / self.budget, self.work_s(prompt) / self.spare_s)

    def service_s(self, prompt: Prompt) -> float:
        return self.work_s(prompt) + self.steps(prompt) * self.overhead_s

    def computed_s(self, prompt: Prompt, num_tokens: float) -> float:
        """Return how long the first `num_tokens` of a prompt take that are to be computed."""
        cached = prompt.num_tokens - prompt.num_computed
        work_s = self.token_s * num_tokens + self.pair_s * num_tokens * (cached + num_tokens / 2)
        if self.work_s(prompt) / self.spare_s > prompt.num_computed / self.budget:
            return work_s * (1 + self.overhead_s / self.spare_s)
        return work_s + num_tokens / self.budget * self.overhead_s

    def num_computed(self, prompt: Prompt, done_s: float) -> float:
        """Return how many tokens are computed after so long."""
        low, high = 0.0, float(prompt.num_computed)
        for _ in range(60 if done_s else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if self.computed_s(prompt, middle) < done_s else (low, middle)
        return low


@dataclass
class Rest:
    """The rest of a prompt, and the part of it that is computed before a new one."""

    prompt: Prompt
    part: float
    num_left: float
    service_s: float
    before: float = 0.0


@dataclass
class NaivePromptQueue:
    policy: SchedulingPolicy
    prompts: dict[int, Prompt] = field(default_factory=dict)
    begun: list[int] = field(default_factory=list)
    latest: list[Prompt] = field(default_factory=list)
    advanced_s: float = 0.0

    def add(self, request_id: int, prompt: Prompt) -> None:
        self.prompts[request_id] = prompt
        self.latest = [*self.latest, replace(prompt)][-RECENT:]

    def begin(self, request_id: int, num_left: int) -> None:
        prompt = self.prompts[request_id]
        prompt.num_left, prompt.num_coming, prompt.has_begun = num_left, 0, True
        if request_id not in self.begun:
            self.begun.append(request_id)

    def expect(self, request_id: int, num_left: int, num_coming: int) -> None:
        prompt = self.prompts[request_id]
        if not prompt.has_begun:
            prompt.num_left, prompt.num_coming = num_left, num_coming

    def remove(self, request_id: int) -> None:
        del self.prompts[request_id]
        if request_id in self.begun:
            self.begun.remove(request_id)

    def advance(self, now_s: float, pace: Pace | None) -> None:
        elapsed_s, self.advanced_s = now_s - self.advanced_s, now_s
        if pace is None:
            return
        for rest in self.in_turn(now_s, pace):
            taken_s = min(elapsed_s, rest.service_s)
            rest.prompt.done_s += taken_s
            elapsed_s -= taken_s

    def in_turn(self, now_s: float, pace: Pace) -> list[Rest]:
        def place(rest: Rest) -> tuple[float, float]:
            ranks = {"spf": rest.num_left, "turns": rest.num_left, "deadline": rest.prompt.deadline_s}
            ratio = (now_s - rest.prompt.arrived_s) / rest.num_left
            return rest.prompt.priority, ranks.get(self.policy, -ratio)

        rests = [self.rest_of(self.prompts[request_id], pace) for request_id in self.begun]
        rests = [rest for rest in rests if rest.service_s > 1e-9]
        return rests if self.policy in ("fcfs", "priority") else sorted(rests, key=place)

    def end_of_class(self, priority: int) -> float:
        if self.policy == "fcfs":
            return math.inf
        return (math.floor(priority / PRIORITIES_PER_CLASS + 0.5) + 0.5) * PRIORITIES_PER_CLASS

    def ahead_of(self, new: Prompt, pace: Pace) -> tuple[float, ...]:
        """Return the fields of `_core.WorkAhead`, in their order."""
        rests = [self.rest_of(self.prompts[request_id], pace) for request_id in sorted(self.prompts)]
        if self.policy == "hrrn":
            self.order_by_ratio(new, pace, rests)
        elif self.policy == "turns":
            self.order_by_turns(new, rests)
        else:
            for rest in rests:
                rest.before = float(self.is_ahead(rest, new))
        share = [self.share(rest, new, pace, rests) for rest in rests]
        together = list(zip(rests, share, strict=True))
        waiting = [(r.prompt, s) for r, s in together if r.before > 0 and not r.prompt.has_begun]
        end = self.end_of_class(new.priority)
        return (
            sum(pace.steps(r.prompt) * r.part * r.before * s for r, s in together),
            sum(pace.work_s(r.prompt) * r.part * r.before * s for r, s in together),
            sum(pace.steps(r.prompt) * r.part * (1 - r.before) for r in rests),
            sum(pace.work_s(r.prompt) * r.part * (1 - r.before) for r in rests),
            sum(s for _, s in waiting),
            sum(prompt.num_computed * s for prompt, s in waiting),
            sum(prompt.has_begun and prompt.priority < end for prompt in self.prompts.values()),
        )

    def rest_of(self, prompt: Prompt, pace: Pace) -> Rest:
        service_s = pace.service_s(prompt)
        done_s = min(prompt.done_s, service_s)
        computed = pace.num_computed(prompt, done_s)
        return Rest(prompt, 1 - done_s / service_s, max(prompt.num_left - computed, 1e-9), service_s - done_s)

    def is_ahead(self, rest: Rest, new: Prompt) -> bool:
        prompt = rest.prompt
        if self.policy == "fcfs" or prompt.priority < new.priority:
            return True
        is_equal = prompt.priority == new.priority
        if self.policy == "priority":
            return is_equal or (prompt.has_begun and prompt.priority < self.end_of_class(new.priority))
        if self.policy == "spf":
            return is_equal and rest.num_left <= new.num_left
        return is_equal and prompt.deadline_s <= new.deadline_s

    def order_by_turns(self, new: Prompt, rests: list[Rest]) -> None:
        turns_s, longer = 0.0, []
        for rest in rests:
            is_longer = lane(rest.num_left) > lane(new.num_left)
            rest.before = float((rest.prompt.priority, is_longer) <= (new.priority, False))
            if rest.prompt.priority == new.priority:
                if is_longer:
                    longer.append(rest)
                else:
                    turns_s += rest.service_s
        for rest in longer:
            taken_s = min(turns_s, rest.service_s)
            rest.before = taken_s / rest.service_s if rest.service_s else 1.0
            turns_s -= taken_s

    def order_by_ratio(self, new: Prompt, pace: Pace, rests: list[Rest]) -> None:
        """Let the engine compute, a step at a time, until the new prompt would be next."""
        time_s = 0.0
        for rest in rests:
            if rest.prompt.priority < new.priority:
                rest.before = 1.0
                time_s += rest.service_s
        equal = [rest for rest in rests if rest.prompt.priority == new.priority]
        own = Rest(new, 1.0, new.num_left, pace.service_s(new))
        left_s = [rest.service_s for rest in equal] + [own.service_s]
        begun = [i for i, rest in enumerate(equal) if rest.prompt.has_begun]
        lanes: dict[int, list[int]] = {}
        for i, rest in enumerate([*equal, own]):
            if i not in begun:
                lanes.setdefault(lane(rest.num_left), []).append(i)

        def place(i: int) -> tuple[float, float]:
            rest = ([*equal, own])[i]
            num_left = rest.num_left * left_s[i] / rest.service_s
            return -(new.arrived_s - rest.prompt.arrived_s + time_s) / num_left, num_left

        while True:
            heads = [waiting[0] for waiting in lanes.values() if waiting]
            first = min([*(i for i in begun if left_s[i] > 1e-9), *heads], key=place)
            if first == len(equal):
                break
            if first in heads:
                lanes[lane(equal[first].num_left)].remove(first)
                begun.append(first)
            turn_s = min(pace.step_s, left_s[first])
            left_s[first] -= turn_s
            time_s += turn_s
        for rest, rest_s in zip(equal, left_s, strict=False):
            rest.before = 1 - rest_s / rest.service_s if rest.service_s else 1.0

    def share(self, rest: Rest, new: Prompt, pace: Pace, rests: list[Rest]) -> float:
        def is_shared(other: Rest) -> bool:
            return other.before > 0 and other.prompt.flow != new.flow and other.prompt.priority == new.priority

        if not is_shared(rest):
            return 1.0
        own_s = pace.service_s(new) + sum(r.service_s for r in rests if r.before > 0 and r.prompt.flow == new.flow)
        of_flow = [other for other in rests if is_shared(other) and other.prompt.flow == rest.prompt.flow]
        most_s = own_s * max(other.prompt.flow_weight for other in of_flow) / new.flow_weight
        return min(1.0, most_s / max(sum(other.service_s for other in of_flow), 1e-9))

    def overtaking_part(self, new: Prompt, pace: Pace, wait_s: float) -> float:
        if self.policy == "fcfs" or len(self.latest) < 2:
            return 0.0

        def part(other: Prompt) -> float:
            if other.priority < new.priority:
                return 1.0
            if other.priority > new.priority or other.flow != new.flow:
                return 0.0
            if self.policy == "hrrn":
                return 1 - other.num_left / new.num_left if lane(other.num_left) < lane(new.num_left) else 0.0
            if self.policy == "spf":
                return float(other.num_left < new.num_left)
            if self.policy == "turns":
                return float(lane(other.num_left) < lane(new.num_left))
            if self.policy == "deadline":
                later_s = (new.deadline_s - new.arrived_s) - (other.deadline_s - other.arrived_s)
                return min(max(later_s / max(wait_s, 1e-9), 0.0), 1.0)
            return 0.0

        span_s = max(new.arrived_s - min(other.arrived_s for other in self.latest), wait_s, 1e-9)
        overtaking_s = sum(part(other) * pace.service_s(other) for other in self.latest)
        return min(overtaking_s / span_s, 0.5 if self.policy == "turns" else MAX_OVERTAKING_PART)


def lane(num_left: float) -> int:
    return math.frexp(max(num_left, 1.0))[1]
