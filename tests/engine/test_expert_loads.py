"""Load factors of experts, from the kernels' counts to what an engine reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swiftkv.engine.expert_loads import ExpertLoads
from tests.engine.engine_process import EngineProcess
from tests.support.checkpoints import make_checkpoint


def test_the_factor_is_of_the_newest_tokens_that_are_enough() -> None:
    first, second = torch.tensor([5, 5]), torch.zeros(2, dtype=torch.int64)
    loads = ExpertLoads({1: first, 4: second})
    assert loads.factors() == {}
    first += torch.tensor([60, 20])
    assert loads.factors() == {1: pytest.approx(40 / 60)}
    first += 70
    second += torch.tensor([0, 64])
    assert loads.factors() == {1: 1.0, 4: 0.5}
    first[0] += 1  # too few to tell
    assert loads.factors() == {1: 1.0, 4: 0.5}
    first += torch.tensor([31, 32])  # with the one before
    assert loads.factors() == {1: 1.0, 4: 0.5}
    assert ExpertLoads({}).factors() == {}


def test_an_engine_reports_it_for_each_layer_with_experts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=3, mlp_only_layers=[1])
    with EngineProcess(tmp_path, dtype="float32", kv_bytes=1 << 22, max_model_len=128, max_num_seqs=4) as engine:
        engine.generate([list(range(5, 105))], max_tokens=4)
        factors = engine.wait_for_rest().expert_load_factors
    assert set(factors) == {0, 2}
    assert all(1 / 6 <= factor <= 1 for factor in factors.values())
