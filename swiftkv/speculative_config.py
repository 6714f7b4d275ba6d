"""The `speculative_config` section of a model, with vLLM's keys: guesses at the next tokens of answers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from swiftkv.config_fields import POSITIVE, Positive, Section


class SpeculativeConfig(Section):
    """Drafts by prompt lookup: copies of what followed the last tokens where these occurred before."""

    method: Literal["ngram"] = Field("ngram", description="ngram, the only method there is")
    num_speculative_tokens: Positive = Field(7, description=POSITIVE)
    prompt_lookup_min: Positive = Field(1, description=POSITIVE)
    prompt_lookup_max: Positive = Field(8, description=POSITIVE)
