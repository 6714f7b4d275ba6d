"""The tokens of one answer, counted while it comes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from swiftkv.engine.messages import HIT_TIERS, Admitted
from swiftkv.server.generation import Generation
from swiftkv.server.responses import CompletionTokensDetails, PromptTokensDetails, Usage


class RunningUsage:
    """The running sums of an answer's `usage`.

    Prompts count once, however many choices they have; their cached tokens are the fewest that one of these choices
    found.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        choices_per_prompt: int,
        generation: Generation,
        *,
        show_cached: bool,
        show_tiers: bool,
        show_reasoning: bool,
    ) -> None:
        self.num_completion_tokens = 0
        self.num_reasoning_tokens = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._choices_per_prompt = choices_per_prompt
        self._generation = generation
        self._show_cached = show_cached
        self._show_tiers = show_tiers
        self._show_reasoning = show_reasoning
        self._num_admitted = 0
        self._admitted_of_prompt: defaultdict[int, dict[int, Admitted]] = defaultdict(dict)  # by sequence
        self._num_cached = 0
        self._num_cached_by_tier: Counter[str] = Counter()

    def now(self) -> Usage:
        total = self._num_prompt_tokens + self.num_completion_tokens
        usage = Usage(self._num_prompt_tokens, self.num_completion_tokens, total)
        if self._show_cached:
            self._take_admitted()
            usage.prompt_tokens_details = PromptTokensDetails(self._num_cached)
            if self._show_tiers:
                usage.prompt_tokens_details.cached_tokens_details = tiers_of(self._num_cached_by_tier)
        if self._show_reasoning:
            usage.completion_tokens_details = CompletionTokensDetails(self.num_reasoning_tokens)
        return usage

    def _take_admitted(self) -> None:
        admitted = self._generation.admitted
        while self._num_admitted < len(admitted):
            index, found = admitted[self._num_admitted]
            self._num_admitted += 1
            choices = self._admitted_of_prompt[index // self._choices_per_prompt]
            if choices:
                self._count(_least(choices), -1)
            choices[index] = found
            self._count(_least(choices), 1)

    def _count(self, found: Admitted, sign: int) -> None:
        self._num_cached += sign * found.cached_tokens
        for tier, num_tokens in found.hit_tokens_by_tier().items():
            self._num_cached_by_tier[tier] += sign * num_tokens


def _least(choices: Mapping[int, Admitted]) -> Admitted:
    """Return the entry of the choice that found the fewest cached tokens."""
    return min(choices.values(), key=lambda found: found.cached_tokens)


def tiers_of(num_cached_by_tier: Mapping[str, int]) -> dict[str, int]:
    """Return `cached_tokens_details` as answers have them, with all tiers."""
    return {tier: num_cached_by_tier.get(tier, 0) for tier in HIT_TIERS}
