"""Cached tokens by tier: a block counts once, wherever its KV groups lay."""

from __future__ import annotations

import numpy as np

from swiftkv.engine.hits import hits_elsewhere
from swiftkv.engine.messages import HIT_TIERS, Admitted

NONE = np.array([], np.int32)


def test_every_block_counts_once() -> None:
    """Block 2 was loaded in one group and lay in borrowed memory in another; block 9 was never looked for below."""
    loaded = {2: "storage", 3: "storage", 4: "host"}
    elsewhere = hits_elsewhere(loaded, np.array([0, 1, 2, 9], np.int32), 16)
    assert elsewhere == {"storage": 32, "host": 16, "peer": 48}
    assert Admitted(1, 160, elsewhere).hit_tokens_by_tier() == {"local": 64, "peer": 48, "host": 16, "storage": 32}


def test_what_lay_nowhere_else_is_local() -> None:
    assert hits_elsewhere({}, NONE, 16) == {}
    assert Admitted(1, 160).hit_tokens_by_tier() == {**dict.fromkeys(HIT_TIERS, 0), "local": 160}
