"""Has an engine compute prompts, takes the outputs at their last positions, and counts their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swiftkv.engine.messages import POOLED_TOKEN, Admitted, Pooling, SamplingParams
from swiftkv.server.errors import ApiError
from swiftkv.server.finished import FinishedRequest
from swiftkv.server.generation import SequenceRequest, Terms
from swiftkv.server.models import ModelHandle
from swiftkv.server.pooling.bodies import PooledBody
from swiftkv.server.pooling.objects import CachedTokens, PooledUsage
from swiftkv.server.request_log import RequestRecord
from swiftkv.server.tiers import priority_in, tier_of
from swiftkv.server.usage import tiers_of

_NO_TOKENS = SamplingParams(max_tokens=1, temperature=0.0, stop_token_ids=[POOLED_TOKEN], ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The outputs that an engine computed for prompts."""

    rows: npt.NDArray[np.float32]  # [num_prompts, width]
    num_tokens: int
    cached: Sequence[Admitted]

    def usage(self, model: ModelHandle, body: PooledBody) -> PooledUsage:
        usage = PooledUsage(self.num_tokens, self.num_tokens)
        if model.policy.shows_cached(body.cache_salt):
            usage.prompt_tokens_details = CachedTokens(sum(found.cached_tokens for found in self.cached))
            if body.return_cached_tokens_details:
                by_tier = sum((Counter(found.hit_tokens_by_tier()) for found in self.cached), Counter[str]())
                usage.prompt_tokens_details.cached_tokens_details = tiers_of(by_tier)
        return usage


async def pool(
    model: ModelHandle, prompts: Sequence[bytes], pooling: Pooling, body: PooledBody, record: RequestRecord
) -> Pooled:
    """Compute prompts, as many at once as one request may have in the engine.

    Raises:
        ApiError: 503 if the engine is down or got other weights meanwhile, 429 if too much is in flight, or the
            engine's status if it refuses a prompt.
    """
    rows: list[bytes] = [b""] * len(prompts)
    cached: list[Admitted] = []
    finished: list[FinishedRequest] = []
    record.finished = finished
    sender = model.policy.sender
    terms = Terms(
        cache_salt=sender.salt(body.cache_salt),
        priority=priority_in(tier_of(None, model.policy.max_tier), body.priority or 0),
        sender=sender,
        is_traced=record.is_traced,
    )
    at_once = model.client.max_sequences_of(sender)
    for start in range(0, len(prompts), at_once):
        while model.must_wake:  # it was put to sleep while nothing was in flight
            await model.sleeper.wake_for_request()
        if model.threads.is_closed:  # by a reload, perhaps with another tokenizer
            message = f"model '{model.name}' was reloaded or removed meanwhile; send the request again"
            raise ApiError(503, message, retry_after_s=1)
        generation = model.client.generate(
            [SequenceRequest(prompt, _NO_TOKENS, pooling) for prompt in prompts[start : start + at_once]],
            terms,
        )
        try:
            with generation:
                async for outputs in generation:
                    for output in outputs:
                        assert output.pooled is not None
                        rows[start + output.index] = output.pooled
        finally:
            finished += generation.finished
        cached += dict(generation.admitted).values()
    numbers = np.frombuffer(b"".join(rows), "<f4").reshape(len(prompts), -1)
    return Pooled(numbers, sum(map(len, prompts)) // 4, cached)


def unit_length(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return `rows` [N, width] divided by their lengths; a row of zeros stays as it is."""
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=-1, keepdims=True))
    scaled: npt.NDArray[np.float32] = (rows / np.maximum(lengths, np.finfo(np.float32).tiny)).astype(np.float32)
    return scaled
