"""The `speculative_config` section of a model, with vLLM's keys: guesses at the next tokens of answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from swiftkv.config_fields import Section

_FEW = "an integer from 1 to 64"

Few = Annotated[int, Field(ge=1, le=64)]


class SpeculativeConfig(Section):
    """Drafts by prompt lookup: copies of what followed the last tokens where these occurred before."""

    method: Literal["ngram"] = Field("ngram", description="ngram, the only method there is")
    num_speculative_tokens: Few = Field(7, description=_FEW)
    prompt_lookup_min: Few = Field(1, description=_FEW)
    prompt_lookup_max: Few = Field(8, description=_FEW)
