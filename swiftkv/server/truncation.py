"""The cut that a request allows through its prompts: vLLM's `truncate_prompt_tokens` and `truncation_side`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from swiftkv.server.errors import ApiError
from swiftkv.server.fields import INT32_MAX, Body

TruncationSide = Literal["left", "right"]

_FIELD = "truncate_prompt_tokens"


class TruncationFields(Body):
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = Field(
        None, description="The most tokens that are kept of a prompt; -1: as many as the model takes"
    )
    truncation_side: TruncationSide | None = Field(
        None,
        description="The side that `truncate_prompt_tokens` cuts off; default: `left`, for embeddings and scores "
        "`right`",
    )


@dataclass(frozen=True, slots=True)
class Truncation:
    """A cut through a prompt: it keeps at most `max_tokens`, and loses those on `side`."""

    max_tokens: int
    side: TruncationSide = "left"

    def cut(self, token_ids: list[int]) -> list[int]:
        """Return the part of a prompt that is kept."""
        if self.side == "right":
            return token_ids[: self.max_tokens]
        return token_ids[max(0, len(token_ids) - self.max_tokens) :]


def asked_truncation(
    body: TruncationFields, max_model_len: int, num_new_tokens: int, *, usual_side: TruncationSide = "left"
) -> Truncation | None:
    """Return the cut that a request asks for, `None` for whole prompts.

    Args:
        num_new_tokens: The tokens that are to be generated after the prompt, 0 where the request does not say.
        usual_side: The side that is cut off where the request does not say.

    Raises:
        ApiError: 400 where nothing of a prompt would be kept, or more than the model takes.
    """
    most = body.truncate_prompt_tokens
    if most is None:
        return None
    if most == 0:
        raise ApiError(400, f"field '{_FIELD}' is 0: nothing would be left of the prompt", param=_FIELD)
    room = max_model_len - num_new_tokens
    if most > room:
        message = (
            f"field '{_FIELD}' is {most}, and of the {max_model_len} tokens that this model takes {num_new_tokens} are "
            f"to be generated: send at most {room}, or -1"
        )
        raise ApiError(400, message, param=_FIELD, code="context_length_exceeded")
    kept = room if most == -1 else most
    # One token at least is generated, even where the request does not say.
    return Truncation(max(1, min(kept, max_model_len - 1)), body.truncation_side or usual_side)
