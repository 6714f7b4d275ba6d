"""A whole engine on the kernels of a GPU, in Triton's interpreter: real processes, the tokens of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from swiftkv.kernels.dispatch import INTERPRET_VARIABLE, OPS_VARIABLE
from swiftkv.lease.messages import LendingSpec, LinkGeometry, PeerSpec
from swiftkv.models.registry import read_config
from tests.engine.engine_process import EngineProcess
from tests.engine.test_parity import greedy
from tests.support.checkpoints import make_checkpoint

SHAPE = {"head_dim": 16, "hidden_size": 32, "intermediate_size": 48}
NUM_TOKENS = 8


@dataclass(frozen=True)
class Tiny:
    directory: Path
    model: PreTrainedModel


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    directory = tmp_path_factory.mktemp("tiny")
    return Tiny(directory, make_checkpoint(directory, "qwen3", **SHAPE))


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(3, 320, n).tolist() for n in (70, 33, 5, 1)]


def has_triton(engine: EngineProcess) -> bool:
    return "libtriton" in Path(f"/proc/{engine.process.pid}/maps").read_text(encoding="utf-8")


@pytest.mark.parametrize("is_ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_prefill_decode_and_the_prefix_cache(is_ahead: bool, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """The long prompt comes in chunks beside the decoding of others, and then from the cache."""
    monkeypatch.setenv(OPS_VARIABLE, "triton")
    monkeypatch.setenv(INTERPRET_VARIABLE, "1")
    expected = greedy(tiny.model, prompts(), NUM_TOKENS)
    options = {"max_num_batched_tokens": 48, "kv_bytes": 1 << 20, "max_num_seqs": 4, "async_scheduling": is_ahead}
    with EngineProcess(tiny.directory, **options) as engine:
        answers = engine.generate(prompts(), max_tokens=NUM_TOKENS)
        again = engine.generate(prompts()[:1], max_tokens=NUM_TOKENS)
        assert has_triton(engine)
    assert [answer.token_ids for answer in answers] == expected
    assert again[0].token_ids == expected[0]
    assert [answer.cached_tokens for answer in again] == [64]


def lending_specs(directory: Path, block_bytes: int, num_extents: int) -> tuple[LendingSpec, LendingSpec]:
    """Return the lending specs of a lender with a pool of `num_extents` blocks, and of a borrower."""
    link = LinkGeometry(0, 0, 1, 1, block_bytes, num_extents, 0, 1)
    addresses = [f"ipc://{directory}/{name}.leases" for name in ("lender", "tiny")]
    return (
        lending_spec(directory, addresses[0], [], [PeerSpec("tiny", addresses[1], [link])], num_extents * block_bytes),
        lending_spec(directory, addresses[1], [PeerSpec("lender", addresses[0], [link])], [], 0),
    )


def lending_spec(
    directory: Path, address: str, lenders: list[PeerSpec], borrowers: list[PeerSpec], budget_bytes: int
) -> LendingSpec:
    return LendingSpec(address, lenders, borrowers, budget_bytes, 60.0, "total", "shm", 1, str(directory), 60.0)


def test_kv_that_is_lent_streams_through_slots_between_the_kernels(
    tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six blocks of its own: what it answers is longer, and beside it others run."""
    (group,) = read_config(tiny.directory).kv_groups(16, "float32")
    lends, borrows = lending_specs(tmp_path_factory.mktemp("leases"), group.block_bytes, num_extents=8)
    generator = np.random.default_rng(1)
    asked = [generator.integers(3, 320, n).tolist() for n in (110, 20)]
    expected = greedy(tiny.model, asked, 3)
    with EngineProcess(tiny.directory, name="lender", kv_bytes=8 * group.block_bytes, max_model_len=64, lending=lends):
        monkeypatch.setenv(OPS_VARIABLE, "triton")
        monkeypatch.setenv(INTERPRET_VARIABLE, "1")
        options = {"kv_bytes": 6 * group.block_bytes, "max_model_len": 160, "max_num_seqs": 4}
        with EngineProcess(tiny.directory, **options, async_scheduling=True, lending=borrows) as engine:
            answers = engine.generate(asked, max_tokens=3)
            stats = engine.wait_for_rest()
    assert [answer.token_ids for answer in answers] == expected
    assert stats.layer_stream_load is not None
    assert stats.layer_stream_store is not None
    assert stats.layer_stream_load.total > 0
    assert stats.layer_stream_store.total > 0


@pytest.mark.parametrize("kernels", ["", "reference"])
def test_an_engine_on_the_cpu_imports_nothing_of_triton(
    kernels: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPS_VARIABLE, kernels)
    with EngineProcess(tiny.directory) as engine:
        answers = engine.generate(prompts(), max_tokens=NUM_TOKENS)
        sampled = engine.generate(prompts()[:1], temperature=0.7, top_p=0.5, seed=1, logprobs=1, prompt_logprobs=0)
        assert not has_triton(engine)
    assert [answer.token_ids for answer in answers] == greedy(tiny.model, prompts(), NUM_TOKENS)
    assert len(sampled[0].token_ids) == 16


def test_the_kernels_of_a_gpu_without_a_gpu_are_refused_in_one_line(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(OPS_VARIABLE, "triton")
    monkeypatch.setenv(INTERPRET_VARIABLE, "0")
    engine = EngineProcess(tiny.directory)
    assert engine.process.wait(60) == 3
    engine.close()
    assert "set TRITON_INTERPRET=1" in capfd.readouterr().err
