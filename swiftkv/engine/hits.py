"""Counts of the cached tokens of prompts by the tier that had them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt


def hits_elsewhere(loaded: Mapping[int, str], borrowed: npt.NDArray[np.int32], block_size: int) -> dict[str, int]:
    """Return the cached tokens of a prompt that lay outside of the engine's own pool, by tier.

    Args:
        loaded: The tier of each block that was loaded for this prompt, by the block's number.
        borrowed: Numbers of the blocks that were found in borrowed memory. A block that was also loaded, for another KV
            group or before it was moved there, counts once, for the tier that it came from.
        block_size: In tokens.
    """
    counts = Counter(loaded.values())
    counts["peer"] = int(np.count_nonzero(np.isin(borrowed, list(loaded), invert=True)))
    return {tier: count * block_size for tier, count in counts.items() if count}
