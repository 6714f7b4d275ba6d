"""The prompts of one model that are not computed yet: how many tokens they have, and when they will be done."""

from __future__ import annotations

from dataclasses import dataclass

_UNKNOWN_RETRY_S = 1.0
MAX_RETRY_S = 600.0
"""The longest `Retry-After`."""


@dataclass(slots=True)
class QueuedPrompts:
    """Counts the prompt tokens of sequences that have no token yet, cached ones included.

    Attributes:
        max_tokens: Further requests are refused while this many tokens wait; `None` for no limit.
        tokens_per_s: How fast the engine expects to compute them; `None` until it knows.
    """

    max_tokens: int | None = None
    tokens_per_s: float | None = None
    num_tokens: int = 0

    @property
    def is_full(self) -> bool:
        return self.max_tokens is not None and self.num_tokens >= self.max_tokens

    def retry_after_s(self) -> float:
        """Return the seconds until the prompts that wait now will have been computed."""
        if not self.tokens_per_s:
            return _UNKNOWN_RETRY_S
        return min(max(_UNKNOWN_RETRY_S, self.num_tokens / self.tokens_per_s), MAX_RETRY_S)
