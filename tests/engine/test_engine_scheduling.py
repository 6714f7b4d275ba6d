"""How an engine cuts and orders prompts changes when answers come, and nothing else."""

from __future__ import annotations

from pathlib import Path

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
