"""Random turns on two ranks above host memory and faulty storage: the tokens are those of ranks without any tier."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from swiftkv.engine.messages import HIT_TIERS
from swiftkv.storage.host_medium import make_host_memory
from tests.engine.engine_process import TIMEOUT_S, EngineProcess
from tests.support.checkpoints import make_checkpoint

MAX_MODEL_LEN = 512
NUM_ROUNDS = 10
FAULTS = {"fail": 0.02, "flip": 0.02, "truncate": 0.02}


def make_rounds(rng: random.Random) -> list[list[list[int]]]:
    """Return the prompts of each round; most begin as earlier ones did."""
    beginnings = [random_tokens(rng, 20, 200) for _ in range(4)]
    rounds = []
    for _ in range(NUM_ROUNDS):
        rounds.append(
            [
                rng.choice(beginnings)[: rng.randrange(10, 220)] + random_tokens(rng, 1, 60)
                for _ in range(rng.randrange(1, 7))
            ]
        )
        beginnings.append(rng.choice(rounds[-1]))
    return rounds


def random_tokens(rng: random.Random, least: int, most: int) -> list[int]:
    return [rng.randrange(3, 320) for _ in range(rng.randrange(least, most))]


def ranks(checkpoint: Path, **options: Any) -> EngineProcess:
    return EngineProcess(checkpoint, tensor_parallel_size=2, max_model_len=MAX_MODEL_LEN, max_num_seqs=6, **options)


def random_options(rng: random.Random, directory: Path, host_fd: int) -> dict[str, Any]:
    file = {"backend": "file", "path": str(directory), "size": rng.choice([1 << 20, 1 << 30]), "min_free": 0}
    faulty = {"backend": "fault", "inner": file, "seed": rng.randrange(1000), **FAULTS}
    spec = {
        "backend": rng.choice([file, faulty]),
        "directory": "/",
        "host_fd": rng.choice([host_fd, None]),
        "prefetch_threshold": 16,
        "write_policy": rng.choice(["write_through", "write_back", "write_through_selective"]),
        "prefetch_policy": rng.choice(["wait_complete", "timeout", "best_effort"]),
    }
    return {
        "storage": spec,
        "kv_bytes": rng.choice([1 << 19, 1 << 20, 1 << 21]),
        "max_num_batched_tokens": rng.choice([64, 128, 300]),
        "async_scheduling": rng.random() < 0.5,
    }


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_tiers_change_no_token_of_several_ranks(arch: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / arch, arch)
    hits: Counter[str] = Counter()
    for seed in range(4):
        rng = random.Random(f"{arch} {seed}")
        rounds = make_rounds(rng)
        with ranks(tmp_path / arch, enable_prefix_caching=False) as plain:
            expected = [[answer.token_ids for answer in plain.generate(prompts)] for prompts in rounds]
        host_fd = make_host_memory(2 << 20, 4096)
        found: list[list[list[int]]] = []
        while len(found) < NUM_ROUNDS:
            with ranks(tmp_path / arch, **random_options(rng, tmp_path / f"kv {seed}", host_fd)) as engine:
                for prompts in rounds[len(found) :][: rng.randrange(1, 5)]:
                    answers = engine.generate(prompts)
                    assert not any(answer.error for answer in answers)
                    found.append([answer.token_ids for answer in answers])
                stats = engine.wait_for_rest()
                assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
                hits.update(stats.hit_tokens_by_tier())
                if rng.random() < 0.3:
                    engine.process.send_signal(signal.SIGKILL)
                    engine.process.wait(TIMEOUT_S)
        os.close(host_fd)
        assert found == expected
    assert all(hits[tier] for tier in HIT_TIERS if tier != "peer"), hits
