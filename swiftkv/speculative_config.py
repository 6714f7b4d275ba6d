"""The `speculative_config` section of a model, with vLLM's keys: guesses at the next tokens of answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from swiftkv.config_fields import POSITIVE, Positive, Section

MatchLength = Annotated[int, Field(ge=1, le=16)]
_MATCH_LENGTH = "an integer from 1 to 16"


class SpeculativeConfig(Section):
    """Drafts by prompt lookup: copies of what followed the last tokens where these occurred before."""

    method: Literal["ngram"] = Field("ngram", description="ngram, the only method there is")
    num_speculative_tokens: Positive = Field(7, description=POSITIVE)
    prompt_lookup_min: MatchLength = Field(1, description=_MATCH_LENGTH)
    prompt_lookup_max: MatchLength = Field(8, description=_MATCH_LENGTH)
