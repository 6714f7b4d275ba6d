"""A runner refuses configurations that cannot work."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from swiftkv.engine.messages import EngineConfig
from swiftkv.engine.runner import ModelRunner
from swiftkv.errors import ConfigError
from swiftkv.lease.messages import LendingSpec, LinkGeometry, PeerSpec
from swiftkv.models.registry import read_config
from swiftkv.units import PoolBytes
from tests.support.checkpoints import make_checkpoint


def test_max_model_len_must_fit_in_the_pool_and_in_what_can_be_lent(tmp_path: Path) -> None:
    """A pool of 8 blocks, and 12 to borrow: 12 slots of one layer leave 8 - 12 / num_layers whole blocks."""
    make_checkpoint(tmp_path, "llama")
    (group,) = read_config(tmp_path).kv_groups(16, "float32")
    link = LinkGeometry(0, 0, 1, 3, 3 * group.block_bytes, 4, 0, 1)
    lending = LendingSpec("", [PeerSpec("lender", "", [link])], [], 0, 60.0, "total", "shm", 2, "", 30.0)
    blocks = 12 + (8 * group.num_layers - 12) // group.num_layers
    alone = EngineConfig("m", str(tmp_path), "", "", PoolBytes(8 * group.block_bytes), 8 * 16, dtype="float32")
    beside = msgspec.structs.replace(alone, lending=lending, max_model_len=blocks * 16)
    for fits in (alone, beside):
        assert ModelRunner(fits).num_blocks == 8
        with pytest.raises(ConfigError, match=f"one sequence of max_model_len {fits.max_model_len + 1} needs"):
            ModelRunner(msgspec.structs.replace(fits, max_model_len=fits.max_model_len + 1))
