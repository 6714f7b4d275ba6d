"""The edits of one request to its logits, the same in every step: logit bias, and no end before `min_tokens`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swiftkv.engine.request import Request


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The tokens that a request edits, each once, in order."""

    token_ids: npt.NDArray[np.int32]  # [n]
    biases: npt.NDArray[np.float32]  # [n]
    min_positions: npt.NDArray[np.int32]  # [n] the token is forbidden before this position; 0: never

    @classmethod
    def of(cls, request: Request) -> LogitEdits | None:
        """Return the edits that `request` asks for, or `None` if it asks for none."""
        bias = request.sampling.logit_bias or {}
        # With a grammar, the masks forbid early ends, except where the grammar allows nothing else.
        is_masked = request.sampling.grammar is not None
        late = request.late_token_ids.tolist() if request.sampling.min_tokens and not is_masked else []
        tokens = sorted({*bias, *late})
        if not tokens:
            return None
        first_position = len(request.prompt) + request.sampling.min_tokens
        return cls(
            np.array(tokens, np.int32),
            np.array([bias.get(token, 0.0) for token in tokens], np.float32),
            np.where(np.isin(tokens, late), first_position, 0).astype(np.int32),
        )
