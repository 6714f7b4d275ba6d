"""The part of an engine's queue that each tenant has, so that a flood of one leaves room for the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swiftkv.server.in_flight import InFlight
from swiftkv.server.tenants import Sender


def limit_met(
    limits: Mapping[str, int | None], in_flight: Iterable[InFlight], sender: Sender, num_more: int
) -> str | None:
    """Return the limit that a tenant would meet with `num_more` further sequences; `None` if there is room.

    Tenants divide `limits`, which are `max_num_queued_reqs` and `max_num_queued_tokens`, by weight.
    """
    if sender.part == 1:
        return None
    own = [sequence for sequence in in_flight if sequence.generation.sender.name == sender.name]
    num_tokens = sum(sequence.request.num_prompt_tokens for sequence in own if sequence.first_token_s is None)
    # Every tenant may have one sequence, and one waiting prompt, however small its part is.
    taken = {"max_num_queued_reqs": len(own) + num_more - 1, "max_num_queued_tokens": num_tokens}
    for name, most in limits.items():
        if most is not None and taken[name] > 0 and taken[name] >= sender.part * most:
            return name
    return None
