"""Warn about configurations that are allowed and probably not meant."""

from __future__ import annotations

from collections.abc import Iterator

from swiftkv.model_config import ModelConfig
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.units import format_size

_FEW_TOKENS = 1024
_FAR_BELOW = 4  # times


def small_contexts(model: ModelConfig, plan: ModelPlan) -> Iterator[str]:
    """Yield a warning if the pool is tiny, or holds far fewer tokens than the longest context of the model.

    The second warning is left out if the file has `max_model_len`, which says that fewer tokens are enough. There is no
    warning for a pool whose size only the engine can find out.
    """
    if not isinstance(plan, SizedPlan):
        return
    if plan.pool_tokens < min(_FEW_TOKENS, plan.max_context_len):
        yield (
            f"{plan.name}: kv_cache.memory, {format_size(plan.pool_bytes)}, holds only {plan.pool_tokens:,} tokens; "
            f"{_enough(plan)}"
        )
    elif model.max_model_len is None and plan.max_model_len * _FAR_BELOW <= plan.max_context_len:
        yield (
            f"{plan.name}: takes {plan.max_model_len:,} tokens of the {plan.max_context_len:,} that the model was made "
            f"for; {_enough(plan)}, or write max_model_len, which says that fewer are enough"
        )


def _enough(plan: SizedPlan) -> str:
    needed = format_size(plan.division.pool_bytes_for_tokens(plan.max_context_len))
    return f"raise kv_cache.memory ({needed} hold {plan.max_context_len:,})"
