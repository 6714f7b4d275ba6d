"""The memory that masters can borrow, from `config.json` alone: the paper's example, Qwen3 by hand, rounding."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.cache.geometry import KVGroup, lay_out
from swiftkv.config import load_config
from swiftkv.engine.lending import check_links
from swiftkv.engine_configs import link_geometry
from swiftkv.errors import ConfigError
from swiftkv.hub import Checkpoint
from swiftkv.planning.lending import BorrowerRoom, plan_lending
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.planning.node import plan_node
from swiftkv.planning.report import lending_as_dict
from swiftkv.units import PoolBytes
from tests.planning.test_model_plans import PUBLISHED, TINY_BLOCK_BYTES, make
from tests.support.hf_configs import LLAMA


def model(name: str, role: str, num_layers: int, num_blocks: int, budget: Fraction | None = None) -> SizedPlan:
    """Make a model whose layer block has 2 KiB."""
    pool_bytes = num_layers * num_blocks * 2048
    return SizedPlan(
        name=name,
        role=role,
        checkpoint=Checkpoint(Path(name), name),
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        groups=(KVGroup(tuple(range(num_layers)), 1, 32, "bfloat16", 16),),
        weight_bytes=0,
        unpacked_bytes=0,
        memory=PoolBytes(pool_bytes),
        group_blocks=(num_blocks,),
        max_model_len=16,
        max_context_len=1_000_000_000,
        vocab_size=1000,
        budget_bytes=None if budget is None else int(budget * pool_bytes),
    )


def planned(tmp_path: Path, *models_yaml: str, node_yaml: str = "") -> tuple[ModelPlan, ...]:
    for name, hf_config in PUBLISHED.items():
        make(tmp_path / name, hf_config)
    make(tmp_path / "tiny", LLAMA)
    file = tmp_path / "node.yaml"
    file.write_text(f"node: {{{node_yaml}}}\nmodels: [{', '.join(f'{{{text}}}' for text in models_yaml)}]")
    plans = plan_node(load_config(file), need_weights=False)
    assert all(isinstance(plan, SizedPlan) for plan in plans)
    return plans


def rooms(tmp_path: Path, *models_yaml: str) -> tuple[BorrowerRoom, ...]:
    return plan_lending(planned(tmp_path, *models_yaml))


def test_the_papers_example() -> None:
    """L = 10, K_master = 100, K = 9 and 8: with workers of the same shape an extent is one block."""
    master = model("m", "master", 10, 10)
    (room,) = plan_lending(
        [master, model("a", "worker", 10, 12, Fraction(3, 4)), model("b", "worker", 10, 16, Fraction(1, 2))]
    )
    assert [pair.borrowed_blocks for pair in room.pairs] == [9, 8]
    assert room.split(0) == (17, 8)
    assert room.sequence_tokens == 25 * 16
    assert room.beside().split(0) == (0, 10)
    assert room.beside().sequence_tokens == 10 * 16


def test_qwen3_32b_borrows_from_8b_and_14b(tmp_path: Path) -> None:
    (room,) = rooms(
        tmp_path,
        "name: m, path: Qwen3-32B, role: master, kv_cache: {memory: 20GiB}",
        "name: w8, path: Qwen3-8B, kv_cache: {memory: 68GiB}, lending: {budget: 75%}",
        "name: w14, path: Qwen3-14B, kv_cache: {memory: 56GiB}, lending: {budget: 75%}",
    )
    w8, w14 = room.pairs
    assert (w8.extent.meu_w, w8.extent.meu_m, w8.extent.num_bytes) == (16, 9, 36 << 20)
    assert (w14.extent.meu_w, w14.extent.meu_m, w14.extent.num_bytes) == (8, 5, 20 << 20)
    # 68 GiB hold 30,947 blocks of 2.25 MiB; three quarters are 23,210, which are 1,450 extents and a bit.
    assert (w8.num_extents, w8.max_extents, w8.borrowed_blocks) == (1450, 1934, 13050)
    assert (w14.num_extents, w14.max_extents, w14.borrowed_blocks) == (2150, 2867, 10750)
    # K_master = 5,120 blocks x 64 layers = 327,680; (327,680 - 23,800) / 64 = 4,748.1
    assert room.split(0) == (23800, 4748)
    assert room.sequence_tokens == (23800 + 4748) * 16
    assert room.longest_context == 40960  # the length the model was made for
    # 303,880 layer blocks are left for RC, 8 over 4,748 blocks: 9 more for LSC cost one of them, 9 fewer none.
    assert room.sequence_tokens_after(w8, 1) == room.sequence_tokens + 8 * 16
    assert room.sequence_tokens_after(w8, -1) == room.sequence_tokens - 9 * 16


def test_more_than_the_layer_stream_cache_can_hold_is_only_for_other_sequences() -> None:
    (room,) = plan_lending([model("m", "master", 10, 10), model("w", "worker", 10, 130, Fraction(1))])
    assert room.split(0) == (100, 0)
    assert (room.sequence_tokens, room.cached_tokens) == (100 * 16, 130 * 16)
    assert room.sequence_tokens_after(room.pairs[0], -1) == room.sequence_tokens
    assert room.sequence_tokens_after(room.pairs[0], 1) is None  # the pool has no more


@pytest.mark.parametrize(("lender_ranks", "layer_blocks"), [(1, 4 * 10), (2, 2 * 10), (4, 10)])
def test_the_block_of_a_master_on_ranks_has_the_parts_that_lie_in_one_pool(
    lender_ranks: int, layer_blocks: int
) -> None:
    master = replace(model("m", "master", 10, 10), tensor_parallel_size=4)
    worker = replace(model("w", "worker", 20, 60, Fraction(1)), tensor_parallel_size=lender_ranks)
    (room,) = plan_lending([master, worker])
    (pair,) = room.pairs
    assert pair.extent.borrower_block_bytes == layer_blocks * 2048
    assert room.borrowed_blocks(0) == 20 * 60 // layer_blocks
    assert link_geometry(pair).extent_bytes == pair.extent.meu_m * layer_blocks * 2048
    assert room.lent_bytes == lender_ranks * worker.pool_bytes


def test_a_worker_lends_to_no_master_whose_ranks_its_own_cannot_divide() -> None:
    workers = [replace(model(str(n), "worker", 10, 60), tensor_parallel_size=n) for n in (1, 2, 4)]
    (room,) = plan_lending([replace(model("m", "master", 10, 10), tensor_parallel_size=2), *workers])
    assert [pair.lender.name for pair in room.pairs] == ["1", "2"]


def test_a_worker_without_a_budget_lends_nothing() -> None:
    (room,) = plan_lending([model("m", "master", 10, 10), model("w", "worker", 7, 100)])
    assert room.pairs[0].num_extents == 0
    assert room.sequence_tokens == room.beside().sequence_tokens
    assert room.sequence_tokens_after(room.pairs[0], -1) is None


def test_the_percentage_is_exact(tmp_path: Path) -> None:
    """0.29 is a little less than 29/100 in binary."""
    (room,) = rooms(
        tmp_path,
        "name: m, path: tiny, role: master",
        f"name: w, path: tiny, kv_cache: {{memory: {100 * TINY_BLOCK_BYTES}}}, lending: {{budget: 29%}}",
    )
    assert room.pairs[0].num_extents == 29


def test_a_budget_is_divided_evenly_among_the_masters() -> None:
    worker = model("w", "worker", 10, 51, Fraction(1))
    both = plan_lending([model("m", "master", 10, 10), worker, model("n", "master", 5, 10)])
    assert [room.borrower.name for room in both] == ["m", "n"]
    pairs = [pair for room in both for pair in room.pairs]
    assert [pair.share for pair in pairs] == [Fraction(1, 2)] * 2
    assert [(pair.num_extents, pair.max_extents, pair.pool_extents) for pair in pairs] == [(25, 25, 51)] * 2
    assert [pair.borrowed_blocks for pair in pairs] == [25, 50]
    assert sum(pair.lent_bytes for pair in pairs) <= worker.pool_bytes


def test_a_budget_in_bytes(tmp_path: Path) -> None:
    (room,) = rooms(
        tmp_path,
        "name: m, path: tiny, role: master",
        f"name: w, path: tiny, kv_cache: {{memory: 1MiB}}, lending: {{budget: {7 * TINY_BLOCK_BYTES + 6000}B}}",
        "name: all, path: tiny, kv_cache: {memory: 1MiB}, lending: {budget: 1MiB}",
    )
    assert [pair.num_extents for pair in room.pairs] == [7, (1 << 20) // TINY_BLOCK_BYTES]
    assert room.pairs[1].lender.budget_part == 1


def test_lending_that_is_off_promises_nothing(tmp_path: Path) -> None:
    models = ("name: m, path: tiny, role: master", "name: w, path: tiny, lending: {budget: 75%}")
    (room,) = plan_lending(planned(tmp_path, *models, node_yaml="lending: off"))
    assert (room.pairs[0].can_lend, room.lent_bytes) == (False, 0)
    (room,) = rooms(tmp_path, *models)
    assert room.pairs[0].can_lend


def test_a_budget_of_zero_can_be_raised_at_run_time_and_none_cannot(tmp_path: Path) -> None:
    (room,) = rooms(
        tmp_path,
        "name: m, path: tiny, role: master",
        "name: zero, path: tiny, lending: {budget: 0}",
        "name: none, path: tiny",
    )
    assert [(pair.can_lend, pair.num_extents) for pair in room.pairs] == [(True, 0), (False, 0)]


LENDER = f"name: w, path: tiny, kv_cache: {{memory: {60 * TINY_BLOCK_BYTES}}}, lending: {{budget: 50%}}"
MASTER = f"name: m, path: tiny, role: master, kv_cache: {{memory: {10 * TINY_BLOCK_BYTES}}}"


def test_a_masters_max_model_len_is_what_the_budgets_promise(tmp_path: Path) -> None:
    """With three layers, 30 borrowed blocks take all 30 layer blocks of the pool."""
    assert planned(tmp_path, MASTER, LENDER)[0].max_model_len == 30 * 16
    assert planned(tmp_path, f"{MASTER}, max_model_len: 480", LENDER)[0].max_model_len == 480
    assert planned(tmp_path, f"{MASTER}, max_model_len: 99", LENDER)[0].max_model_len == 99
    assert planned(tmp_path, MASTER, LENDER, node_yaml="lending: off")[0].max_model_len == 10 * 16
    # Two masters: 15 blocks each, 5 whole ones beside their slots.
    assert [plan.max_model_len for plan in planned(tmp_path, MASTER, LENDER, MASTER.replace("m,", "n,", 1))] == [
        20 * 16, 512, 20 * 16,
    ]  # fmt: skip


def test_more_than_the_budgets_promise_is_a_mistake_that_says_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, f"{MASTER}, max_model_len: 481", LENDER)
    assert str(caught.value) == (
        "models[0].max_model_len: 481 is more than the 480 tokens that fit: kv_cache.memory holds 160, and the memory "
        "that w may lend holds the rest; lower it, or raise kv_cache.memory or a worker's lending.budget"
    )
    with pytest.raises(
        ConfigError, match=r"^models\[0\].kv_cache.memory: 60KiB holds 160 tokens, one sequence of 161 "
    ):
        planned(tmp_path, f"{MASTER}, max_model_len: 161", LENDER, node_yaml="lending: off")
    with pytest.raises(
        ConfigError, match=r"^models\[1\].kv_cache.memory: 60KiB holds 160 tokens, one sequence of 161 "
    ):
        planned(tmp_path, LENDER, f"{MASTER}, max_model_len: 161".replace("role: master", "role: worker"))


@pytest.mark.parametrize("role", ["master", "worker"])
def test_one_role_alone_has_no_pairs(role: str) -> None:
    assert plan_lending([model("a", role, 10, 10), model("b", role, 10, 10)]) == ()


def test_a_master_of_two_kv_groups_has_room_for_a_token_in_each() -> None:
    """Lent memory is divided in the proportion of the groups' blocks: 3 and 1 layers of 4."""
    full = KVGroup((0, 1, 2), 1, 32, "bfloat16", 16)
    windowed = KVGroup((3,), 1, 32, "bfloat16", 16, kind="window", window=1024)
    master = replace(model("m", "master", 4, 10), groups=(full, windowed), group_blocks=(10, 10))
    (room,) = plan_lending([master, model("w", "worker", 3, 40, Fraction(1))])
    assert [(p.extent.meu_w, p.extent.meu_m, p.num_extents) for p in room.pairs] == [(1, 1, 30), (1, 3, 10)]
    assert [room.split(0), room.split(1)] == [(30, 0), (10, 0)]
    assert room.sequence_tokens == 10 * 16
    short = replace(windowed, window=64)  # which leaves the window group no matter how long a sequence is
    assert replace(room, borrower=replace(master, groups=(full, short))).sequence_tokens == 30 * 16


def test_a_worker_whose_groups_share_extents_lends_whole_ones_of_them() -> None:
    """Three full blocks or one of the window's are an extent of 6 KiB; two of those hold three blocks of the master."""
    full = KVGroup((0,), 1, 32, "bfloat16", 16)
    windowed = KVGroup((1, 2, 3), 1, 32, "bfloat16", 16, kind="window", window=64)
    worker = replace(
        model("w", "worker", 3, 20, Fraction(1, 2)),
        groups=(full, windowed),
        group_blocks=(60, 20),
        shares_extents=True,
    )
    (room,) = plan_lending([model("m", "master", 2, 30), worker])
    (pair,) = room.pairs
    assert (pair.lender_group, pair.share) == (0, 1)
    assert (pair.extent.num_bytes, pair.meu_w, pair.extent.meu_m) == (12 << 10, 6, 3)
    assert (pair.pool_extents, pair.max_extents, pair.num_extents) == (10, 10, 5)
    assert (pair.lent_blocks, pair.lent_bytes, pair.borrowed_blocks) == (30, 60 << 10, 15)
    link = link_geometry(pair)
    assert (link.lender_group, link.meu_w, link.num_extents, link.lender_base_offset_bytes) == (0, 6, 10, 0)
    counts = list(zip(worker.groups, worker.group_blocks, strict=True))
    check_links([link], lay_out(counts, shares_extents=True))


def test_a_pool_of_a_petabyte_is_planned_at_once() -> None:
    (room,) = plan_lending([model("m", "master", 61, 10**12), model("w", "worker", 53, 10**12, Fraction(9, 10))])
    pair = room.pairs[0]
    assert (pair.extent.is_lcm, pair.num_extents) == (False, 900_000_000_000 // pair.extent.meu_w)


@given(
    master_layers=st.integers(1, 80),
    worker_layers=st.integers(1, 80),
    blocks=st.integers(1, 10_000),
    percent=st.integers(0, 99),
)
def test_a_larger_budget_never_means_a_shorter_context(
    master_layers: int, worker_layers: int, blocks: int, percent: int
) -> None:
    master = model("m", "master", master_layers, 50)
    (less,), (more,) = (
        plan_lending([master, model("w", "worker", worker_layers, blocks, Fraction(p, 100))])
        for p in (percent, percent + 1)
    )
    assert less.beside().sequence_tokens <= less.sequence_tokens <= more.sequence_tokens
    assert less.cached_tokens >= less.sequence_tokens
    assert less.pairs[0].lent_bytes * 100 <= percent * less.pairs[0].lender.pool_bytes
    one_more = less.sequence_tokens_after(less.pairs[0], 1)
    assert one_more is None or less.sequence_tokens <= one_more


def test_the_machine_readable_plan_is_json() -> None:
    master, worker = model("m", "master", 10, 10), model("w", "worker", 5, 20, Fraction(1, 2))
    as_json = json.loads(json.dumps(lending_as_dict(plan_lending([master, worker]))))
    (of_master,) = as_json["masters"]
    assert of_master["with_lending"] == {
        "kv_groups": [{"k_master": 100, "sum_k_i": 5, "n_lsc": 5, "n_rc": 9}],
        "sequence_tokens": 14 * 16,
        "longest_context": 14 * 16,
        "cached_tokens": 14 * 16,
    }
    (pair,) = of_master["pairs"]
    assert (pair["worker"], pair["budget_bytes"], pair["share"]) == ("w", 50 * 2048, 1.0)
    assert (pair["meu_w"], pair["meu_m"], pair["pool_extents"]) == (2, 1, 10)
    assert (pair["extent_bytes"], pair["extent_is_lcm"], pair["extent_wasted_bytes"]) == (10 * 2048, True, 0)
    assert (pair["num_extents"], pair["lent_blocks"], pair["k_i"], pair["tokens_per_extent"]) == (5, 10, 5, 16)
    assert pair["this_worker_alone"] == of_master["with_lending"]
    # 95 layer blocks are left for RC, 5 over 9 blocks: the sixth extent's slot is one of those.
    assert pair["sequence_tokens_one_extent_more"] == 15 * 16
