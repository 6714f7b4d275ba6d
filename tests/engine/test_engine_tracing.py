"""The steps of traced requests: every chunk of a prompt once, and nothing of anybody else."""

from __future__ import annotations

from pathlib import Path

from swiftkv.engine.runner import ModelRunner
from tests.engine.engine_thread import EngineThread
from tests.support.checkpoints import make_checkpoint

CHUNK = 48


def test_chunks_of_a_traced_prompt(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3")
    prompt = [3 + i % 300 for i in range(130)]
    engine = EngineThread(tmp_path, ModelRunner, max_num_batched_tokens=CHUNK)
    with engine.running():
        others = [engine.add([5, 6, 7 + i], max_tokens=20) for i in range(3)]
        traced = engine.add(prompt, max_tokens=4, is_traced=True)
        again = engine.add([*prompt, 9], max_tokens=2, is_traced=True)
        *silent, first, second = engine.wait([*others, traced, again])
    assert [answer.steps for answer in silent] == [[], [], []]
    for answer, num_prompt in ((first, len(prompt)), (second, len(prompt) + 1)):
        computed = [step.num_prompt_tokens for step in answer.steps]
        assert sum(computed) == num_prompt - (answer.cached_tokens or 0)
        assert max(computed) <= CHUNK
        moments = [moment for step in answer.steps for moment in (step.began_ns, step.ended_ns)]
        assert moments == sorted(moments)
        assert all(step.exposed_s == 0 for step in answer.steps)
    assert len(first.steps) >= 3
