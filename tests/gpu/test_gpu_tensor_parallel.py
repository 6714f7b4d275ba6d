"""Ranks on GPUs: one has a GPU of its own, and NCCL between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("msgspec")  # needed to read config.json
pytest.importorskip("transformers")
pytest.importorskip("zmq")
pytest.importorskip("pydantic")
pytest.importorskip("swiftkv._core")

from swiftkv.engine.rank_group import RankGroup
from tests.engine.engine_process import EngineProcess
from tests.support.checkpoints import make_checkpoint

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * i + shift) % 320 for i in range(n)] for shift, n in enumerate((100, 2, 37))]


def test_a_group_of_one_gives_back_what_it_is_given(tmp_path: Path) -> None:
    """One GPU can show only that NCCL accepts our calls."""
    group = RankGroup(tmp_path / "group", 0, 1, torch.device("cuda:0"))
    rows = torch.randn(3, 8, device="cuda:0", dtype=torch.bfloat16)
    gathered = group.gather(rows)
    assert gathered is not None
    for received in (group.all_gather(rows), gathered, group.all_to_all(rows.unsqueeze(0))):
        assert torch.equal(received, rows.unsqueeze(0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_give_the_logprobs_of_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    logprobs = []
    for size in (1, 2):
        options: dict[str, Any] = {"tensor_parallel_size": size, "dtype": "bfloat16", "enforce_eager": True}
        with EngineProcess(tmp_path, device="cuda:0", **options) as engine:
            answers = engine.generate(PROMPTS, max_tokens=1, prompt_logprobs=0)
        assert all(answer.prompt_logprobs is not None for answer in answers)
        logprobs.append([entry.logprob for answer in answers for entry in answer.prompt_logprobs or []])
    assert logprobs[1] == pytest.approx(logprobs[0], abs=0.2)
