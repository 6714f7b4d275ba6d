"""The tokens of one answer, counted while it comes."""

from __future__ import annotations

from swiftkv.server.generation import Generation
from swiftkv.server.responses import CompletionTokensDetails, PromptTokensDetails, Usage


class RunningUsage:
    """The running sums of an answer's `usage`.

    Prompts count once, however many choices they have; so does what any of these found in the cache, at least.
    """

    def __init__(
        self,
        num_prompt_tokens: int,
        choices_per_prompt: int,
        generation: Generation,
        *,
        show_cached: bool,
        show_reasoning: bool,
    ) -> None:
        self.num_completion_tokens = 0
        self.num_reasoning_tokens = 0
        self._num_prompt_tokens = num_prompt_tokens
        self._choices_per_prompt = choices_per_prompt
        self._generation = generation
        self._show_cached = show_cached
        self._show_reasoning = show_reasoning
        self._num_admitted = 0
        self._cached_by_prompt: dict[int, int] = {}
        self._num_cached = 0

    def now(self) -> Usage:
        total = self._num_prompt_tokens + self.num_completion_tokens
        usage = Usage(self._num_prompt_tokens, self.num_completion_tokens, total)
        if self._show_cached:
            self._take_admitted()
            usage.prompt_tokens_details = PromptTokensDetails(self._num_cached)
        if self._show_reasoning:
            usage.completion_tokens_details = CompletionTokensDetails(self.num_reasoning_tokens)
        return usage

    def _take_admitted(self) -> None:
        admitted = self._generation.admitted
        while self._num_admitted < len(admitted):
            index, num_cached = admitted[self._num_admitted]
            self._num_admitted += 1
            prompt = index // self._choices_per_prompt
            before = self._cached_by_prompt.get(prompt)
            if before is None or num_cached < before:
                self._cached_by_prompt[prompt] = num_cached
                self._num_cached += num_cached - (before or 0)
