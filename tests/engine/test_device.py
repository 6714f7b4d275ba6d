"""The step that an engine on a GPU measures its memory with, on the CPU: it is as large as one may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftkv.cache.pool import Pool
from swiftkv.engine.cuda_graphs import DecodeGraphs, DecoderSteps
from swiftkv.engine.device import capture_streaming, run_largest_step
from swiftkv.engine.messages import EngineConfig
from swiftkv.kernels.dispatch import reference_ops
from swiftkv.lease.messages import LendingSpec
from swiftkv.master.layer_stream import LayerStream
from swiftkv.models.batch import ModelInput
from swiftkv.models.decoder import Decoder
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from swiftkv.transport.shm import ShmTransport
from swiftkv.units import PoolBytes
from tests.support.checkpoints import make_checkpoint


class Watched:
    """A decoder that notes the size of its step."""

    lengths: list[int]
    num_rows: int

    def __init__(self, decoder: Decoder) -> None:
        self.kv_groups = decoder.kv_groups
        self._decoder = decoder

    def forward(self, batch: ModelInput, regions: list[torch.Tensor]) -> torch.Tensor:
        self.lengths = batch.query_starts.diff().tolist()
        assert batch.context_lens.tolist() == self.lengths
        return self._decoder.forward(batch, regions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_rows = len(hidden)
        return self._decoder.logits(hidden)


@pytest.mark.parametrize(
    ("max_model_len", "max_num_batched_tokens", "lengths"),
    [(50, 120, [50, 50, 20]), (64, 128, [64, 64]), (300, 90, [90]), (300, 1, [1])],
)
def test_it_has_all_tokens_and_all_rows(
    max_model_len: int, max_num_batched_tokens: int, lengths: list[int], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "qwen3")
    decoder_config = read_config(tmp_path)
    config = EngineConfig(
        "tiny", str(tmp_path), "", "", PoolBytes(0), max_model_len, dtype="float32", max_num_seqs=7,
        max_num_batched_tokens=max_num_batched_tokens,
    )  # fmt: skip
    weights = MappedWeights(tmp_path)
    decoder = load_decoder(decoder_config, weights, torch.float32, "cpu", max_model_len, ops=reference_ops())
    watched = Watched(decoder)
    with torch.inference_mode():
        run_largest_step(config, watched, torch.device("cpu"))
    assert watched.lengths == lengths
    assert watched.num_rows == min(7, sum(lengths))


def test_graphs_stream_only_where_kernels_reach_the_peers(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    decoder_config = read_config(tmp_path)
    groups = decoder_config.kv_groups(16, "float32")
    pool = Pool([(group, 4) for group in groups])
    decoder = load_decoder(decoder_config, MappedWeights(tmp_path), torch.float32, "cpu", 64, ops=reference_ops())
    graphs = DecodeGraphs(DecoderSteps(decoder, [pool.tensor], torch.zeros(1, dtype=torch.int32)), torch.device("cpu"))
    lending = LendingSpec("", [], [], 0, 60.0, "total", "shm", 2, "", 30.0)
    config = EngineConfig(
        "tiny", str(tmp_path), "", "", PoolBytes(0), 64, dtype="float32", max_num_seqs=1, lending=lending
    )
    transport = ShmTransport(pool)
    capture_streaming(config, graphs, LayerStream(transport, groups), transport)
    assert graphs.sizes(1) == graphs.sizes(2) == []
    transport.close()
