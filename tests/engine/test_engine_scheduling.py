"""The engine's cutting and ordering of prompts changes when answers come, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from swiftkv._core import PRIORITIES_PER_CLASS, GroupSpec
from swiftkv.engine.lending import make_scheduler
from swiftkv.engine.messages import EngineConfig
from swiftkv.units import PoolBytes
from tests.engine.engine_process import EngineProcess
from tests.support.checkpoints import make_checkpoint

OPTIONS = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256, "enable_prefix_caching": False}


def test_answers_do_not_depend_on_when_steps_end(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    prompts = [
        [7 * i % 90 + 3 for i in range(begin, begin + length)] for begin, length in ((1, 400), (9, 30), (5, 300))
    ]
    with EngineProcess(tmp_path, target_tpot_s=1e-4, **OPTIONS) as engine:
        alone = [engine.generate([prompt], max_tokens=6)[0] for prompt in prompts]
        stream = engine.add([3, 4, 5], max_tokens=300)
        while not engine.answers[stream].token_ids:
            engine.take_one()
        beside = engine.wait([engine.add(prompt, max_tokens=6) for prompt in prompts])
        engine.wait([stream])
        assert [answer.token_ids for answer in beside] == [answer.token_ids for answer in alone]
        assert engine.wait_for_rest().step_time_error_ratio > 0


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_answer_that_is_displaced_goes_on_as_if_nothing_had_happened(tmp_path: Path, async_scheduling: bool) -> None:
    make_checkpoint(tmp_path, "llama")
    shared = [7 * i % 90 + 3 for i in range(240)]
    sampling: dict[str, Any] = {"max_tokens": 100, "temperature": 1.0, "seed": 5, "frequency_penalty": 0.5}
    options = {"max_num_seqs": 2, "long_prefill_token_threshold": 16, "async_scheduling": async_scheduling}
    with EngineProcess(tmp_path, **options) as engine:
        [alone] = engine.generate([[3, 4, 5]], **sampling)
        with engine.at_once():
            first = engine.add(shared, max_tokens=100)
            batch = engine.add([3, 4, 5], priority=2 * PRIORITIES_PER_CLASS, **sampling)
            # Waits for what it shares with the first, while batch work takes the other slot, and then wants that.
            second = engine.add([*shared, 3, 4], max_tokens=4)
        engine.wait([first, second, batch])
        assert engine.answers[batch].token_ids == alone.token_ids
        assert engine.wait_for_rest().num_displaced_total == [0, 0, 0, 1]


def test_an_engine_begins_with_the_step_times_of_those_before_it() -> None:
    config = EngineConfig("tiny", "", "", "", PoolBytes(1 << 20), **OPTIONS)  # type: ignore[arg-type]
    known = msgspec.structs.replace(config, step_time_s=[1e-3, 1e-7, 1e-7, 1e-4, 0.0, 0.02])
    groups = [GroupSpec(2, 64)]
    assert not make_scheduler(config, groups).step_time().is_known
    assert make_scheduler(known, groups).step_time().is_known
