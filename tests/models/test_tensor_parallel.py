"""A model that is divided between ranks says what transformers and the whole model say. Ranks are threads, on gloo."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from swiftkv.engine.rank_group import RankGroup
from swiftkv.errors import ConfigError
from swiftkv.kernels.dispatch import cpu_ops, reference_ops
from swiftkv.kernels.ops import AnyOps
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.parallel import Communicator, add_all
from swiftkv.models.registry import read_config
from swiftkv.models.weights import RankSlices
from tests.support.checkpoints import make_checkpoint
from tests.support.paged import PagedRunner

T = TypeVar("T")

CHUNKS = [(1000,), (16,), (5, 1, 24)]

CASES: dict[str, dict[str, Any]] = {
    "qwen3": {"arch": "qwen3"},
    "qwen2 with biases": {"arch": "qwen2"},
    "llama with all biases": {"arch": "llama", "attention_bias": True, "mlp_bias": True},
    "llama tied": {"arch": "llama", "tie_word_embeddings": True},
    "one KV head": {"arch": "llama", "num_key_value_heads": 1, "head_dim": 64},
    "qwen3_moe": {"arch": "qwen3_moe", "num_hidden_layers": 2, "mlp_only_layers": [0]},
    "mixtral": {"arch": "mixtral"},
    "odd vocabulary": {"arch": "qwen3", "vocab_size": 321, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """Make the checkpoint of a case at its first use: (directory, oracle)."""

    @cache
    def make(case: str) -> tuple[Path, PreTrainedModel]:
        directory = tmp_path_factory.mktemp("tiny")
        return directory, make_checkpoint(directory, **CASES[case])

    return make


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[[int, Callable[[Communicator], T]], list[T]]:
    """Do the same work on a number of ranks, and return the result of each."""

    def run(size: int, work: Callable[[Communicator], T]) -> list[T]:
        store = tmp_path / f"{size} ranks"

        def as_rank(rank: int) -> T:
            return work(RankGroup(store, rank, size, torch.device("cpu")))

        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(as_rank, range(size)))

    return run


def prompts(vocab_size: int = 320) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(1)
    return {str(n): torch.randint(vocab_size, (n,), generator=generator).tolist() for n in (1, 17, 33, 70)}


def logits_of(directory: Path, ops: AnyOps, dtype: torch.dtype, communicator: Communicator) -> list[dict[str, Tensor]]:
    """Return the logits of all prompts at every position, once for each of CHUNKS."""
    decoder = load_decoder(
        read_config(directory),
        MappedWeights(directory),
        dtype,
        "cpu",
        128,
        ops=ops,
        communicator=communicator,
    )
    return [PagedRunner(decoder, seed=seed).run(prompts(), chunks) for seed, chunks in enumerate(CHUNKS)]


@pytest.mark.parametrize(("case", "size"), [*((case, 2) for case in CASES), ("qwen3", 4), ("odd vocabulary", 4)])
def test_logits_equal_transformers(case: str, size: int, ops: AnyOps, checkpoint: Any, on_ranks: Any) -> None:
    directory, model = checkpoint(case)
    first, *others = on_ranks(size, lambda communicator: logits_of(directory, ops, torch.float32, communicator))
    for name, prompt in prompts().items():
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        assert expected.std() > 0.3, "logits too flat to tell anything"
        for logits in first:
            torch.testing.assert_close(logits[name], expected, atol=1e-4, rtol=0)
    assert all(rows.numel() == 0 for rank in others for logits in rank for rows in logits.values())


@pytest.mark.usefixtures("needs_cpu_ops")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_do_not_depend_on_chunks_batch_or_blocks(
    size: int, dtype: torch.dtype, checkpoint: Any, on_ranks: Any
) -> None:
    """They are equal to the bit, as with one rank; this makes prefix cache, chunking and preemption invisible."""
    directory, _ = checkpoint("qwen3")
    (whole, *cut), *_ = on_ranks(size, lambda communicator: logits_of(directory, cpu_ops(), dtype, communicator))
    for logits in cut:
        assert all(torch.equal(logits[name], whole[name]) for name in whole)


def test_bfloat16_errs_as_little_as_one_rank(checkpoint: Any, on_ranks: Any) -> None:
    """Both from the float32 model on weights that bfloat16 rounds."""
    directory, _ = checkpoint("qwen2 with biases")
    exact, alone, divided = (
        on_ranks(size, lambda ranks, dtype=dtype: logits_of(directory, reference_ops(), dtype, ranks))[0][0]
        for size, dtype in ((1, torch.float32), (1, torch.bfloat16), (2, torch.bfloat16))
    )
    for name in exact:
        assert (divided[name] - exact[name]).std() < 1.5 * (alone[name] - exact[name]).std()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_sums_are_in_the_order_of_the_ranks_whatever_their_size(size: int, dtype: torch.dtype, on_ranks: Any) -> None:
    rows, width = 3000, 240  # of bytes for two phases; ten of the rows are for one
    generator = torch.Generator().manual_seed(2)
    partials = torch.randn(size, rows, width, generator=generator).to(dtype)
    residual = torch.randn(rows, width, generator=generator).to(dtype)
    expected = residual.float()
    for partial in partials:
        expected = expected + partial.float()

    def add(communicator: Communicator) -> tuple[Tensor, Tensor]:
        many, few = residual.clone(), residual[:10].clone()
        add_all(many, partials[communicator.rank], communicator)
        add_all(few, partials[communicator.rank, :10], communicator)
        return many, few

    for many, few in on_ranks(size, add):
        assert torch.equal(many, expected.to(dtype))
        assert torch.equal(few, expected[:10].to(dtype))


def test_a_number_of_ranks_that_does_not_divide_is_refused_with_those_that_do(checkpoint: Any) -> None:
    config = read_config(checkpoint("qwen3")[0])
    with pytest.raises(ConfigError) as error:
        config.of_rank(3)
    assert str(error.value) == (
        "tensor_parallel_size: 3 ranks cannot divide 4 heads, 2 KV heads and an intermediate_size of 96 evenly; "
        "possible are 1, 2, 4"
    )


def test_ranks_share_the_weights_and_every_head_is_with_its_kv_head(checkpoint: Any) -> None:
    config = read_config(checkpoint("qwen3")[0])
    for size in (1, 2, 4):
        slices = [RankSlices.of(config, rank, size) for rank in range(size)]
        for parts, whole in (
            ([of_rank.heads[0].q for of_rank in slices], 4 * 32),
            ([of_rank.mlp for of_rank in slices], 96),
            ([of_rank.vocab for of_rank in slices], 320),
        ):
            ends = [0, *(part.stop for part in parts)]
            assert [part.start for part in parts] == ends[:-1]
            assert ends[-1] == whole
        [kind] = config.attention
        for of_rank in slices:
            [part] = of_rank.heads
            kv_heads = {head // (kind.num_heads // kind.num_kv_heads) for head in heads(part.q)}
            assert kv_heads == heads(part.k) == heads(part.v)


def heads(part: slice) -> set[int]:
    return {index // 32 for index in range(part.start, part.stop)}
