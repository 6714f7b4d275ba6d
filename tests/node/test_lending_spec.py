"""The lending specs of engines: both ends of a link, and the plan, agree to the extent."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.config import Config, load_config
from swiftkv.engine.lending import check_links
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine_configs import compile_engines, link_geometry, why_not_lend
from swiftkv.lease.messages import LendingSpec
from swiftkv.planning.lending import plan_lending
from swiftkv.planning.models import SizedPlan
from swiftkv.planning.node import plan_node
from swiftkv.planning.transports import lending_transports
from swiftkv.worker.borrowers import borrowers_of

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}
MODELS: list[dict[str, Any]] = [
    {"name": "one", "path": "layers3", "role": "master"},
    {"name": "lender", "path": "layers4", "lending": {"budget": "75%", "window": "10s", "policy": "longest"}},
    {"name": "two", "path": "layers2", "role": "master"},
    {"name": "later", "path": "layers3", "lending": {"budget": 0}},
    {"name": "keeper", "path": "layers3"},
]


def planned(tmp_path: Path, models: list[dict[str, Any]], **node: Any) -> tuple[Config, tuple[SizedPlan, ...]]:
    for num_layers in (2, 3, 4):
        directory = tmp_path / f"layers{num_layers}"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps({**HF_CONFIG, "num_hidden_layers": num_layers}))
    file = tmp_path / "node.yaml"
    models = [{"kv_cache": {"memory": "1MiB"}, **model} for model in models]
    file.write_text(yaml.safe_dump({"node": node, "models": models}))
    config = load_config(file)
    plans = plan_node(config, need_weights=False)
    return config, tuple(plan for plan in plans if isinstance(plan, SizedPlan))


def compiled(config: Config, plans: tuple[SizedPlan, ...]) -> tuple[EngineConfig, ...]:
    numbers = {plan.name: number for number, plan in enumerate(plans)}
    return compile_engines(config, plans, lending_transports(config, plans), Path("/run/ipc"), numbers)


def specs(tmp_path: Path, models: list[dict[str, Any]] = MODELS, **node: Any) -> dict[str, LendingSpec | None]:
    config, plans = planned(tmp_path, models, **node)
    return {engine.name: engine.lending for engine in compiled(config, plans)}


def test_both_ends_of_a_link_are_told_the_same(tmp_path: Path) -> None:
    told = specs(tmp_path)
    assert told["keeper"] is None
    for name, spec in told.items():
        for peer in spec.lenders if spec else []:
            other = told[peer.name]
            assert other is not None
            assert other.leases_address == peer.leases_address
            (end,) = (borrower for borrower in other.borrowers if borrower.name == name)
            assert end.links == peer.links
    one, lender, later = told["one"], told["lender"], told["later"]
    assert one
    assert lender
    assert later
    assert [peer.name for peer in one.lenders] == ["lender", "later"]
    assert [peer.name for peer in lender.borrowers] == [peer.name for peer in later.borrowers] == ["one", "two"]
    assert (one.borrowers, lender.lenders) == ([], [])
    assert one.leases_address == "ipc:///run/ipc/0.leases"


def test_a_link_is_over_the_whole_pool_and_the_budget_is_the_plans(tmp_path: Path) -> None:
    config, plans = planned(tmp_path, MODELS)
    told = {engine.name: engine.lending for engine in compiled(config, plans)}
    lender_plan = plans[1]
    for room in plan_lending(plans):
        pair = room.pairs[0]
        spec = told["lender"]
        assert spec is not None
        (link,) = next(peer.links for peer in spec.borrowers if peer.name == room.borrower.name)
        assert link.num_extents == lender_plan.group_blocks[link.lender_group] // link.meu_w
        assert link.num_extents * link.extent_bytes <= lender_plan.pool_bytes
        # An even part of the budget holds as much as the plan promised.
        assert spec.budget_bytes // 2 // link.extent_bytes == pair.num_extents > 0
    assert (told["lender"].budget_bytes, told["later"].budget_bytes) == (lender_plan.pool_bytes * 3 // 4, 0)
    assert (told["lender"].window_s, told["lender"].policy) == (10.0, "longest")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_a_link_begins_where_the_pool_of_the_lender_has_its_group(device: str, tmp_path: Path) -> None:
    """Models of two KV groups each; pools on GPUs are laid out as the host's are (`tests/gpu`)."""
    _, plans = planned(tmp_path, MODELS[:2])
    groups = (
        KVGroup((0, 2), 2, 16, "bfloat16", 16),
        KVGroup((1, 3, 4), 1, 32, "bfloat16", 16, kind="window", window=64),
    )
    plans = tuple(
        replace(plan, groups=groups, group_blocks=(70, 70), device=device, shares_extents=False) for plan in plans
    )
    links = [link_geometry(pair) for room in plan_lending(plans) for pair in room.pairs]
    assert sorted({(link.lender_group, link.borrower_group) for link in links}) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    pool = Pool([(group, 70) for group in groups])
    check_links(links, pool.regions)
    begins = {link.lender_group: link.lender_base_offset_bytes for link in links}
    assert [begins[0], begins[1]] == [region.base_offset_bytes for region in pool.regions]
    for wrong in ({"lender_base_offset_bytes": 1024}, {"lender_group": 1}, {"num_extents": 71}):
        with pytest.raises(AssertionError):
            check_links([msgspec.structs.replace(links[0], **wrong)], pool.regions)


@pytest.mark.parametrize(
    ("shares_extents", "parts"),
    [(False, (Fraction(2, 3), Fraction(1, 3))), (True, (Fraction(17, 20), Fraction(3, 20)))],
)
def test_a_master_s_groups_borrow_in_proportion(
    tmp_path: Path, shares_extents: bool, parts: tuple[Fraction, Fraction]
) -> None:
    """A pool may have a sixth as many blocks of windows as of full attention, each of them three times as large.

    Where groups have no part of it, windows borrow little: only what rests.
    """
    config, plans = planned(tmp_path, MODELS[:2])
    groups = (
        KVGroup((0,), 1, 32, "bfloat16", 16),
        KVGroup((1, 2, 3), 1, 32, "bfloat16", 16, kind="window", window=64),
    )
    master = replace(plans[0], groups=groups, group_blocks=(180, 30), shares_extents=shares_extents)
    plans = (master, plans[1])
    told = {engine.name: engine.lending for engine in compiled(config, plans)}
    assert told["lender"] is not None
    (peer,) = borrowers_of(told["lender"])
    pairs = plan_lending(plans)[0].pairs
    assert [pair.share for pair in pairs] == [*parts]
    assert [float(link.share) for link in peer.links] == pytest.approx([*map(float, parts)], rel=0.04)  # whole extents


def test_a_borrower_says_come_again_when_its_lenders_have_forgotten_their_own_demand(tmp_path: Path) -> None:
    lenders = [{**MODELS[1], "name": f"lender{i}"} for i in range(2)]
    for lender, window in zip(lenders, ("45s", "2m"), strict=True):
        lender["lending"] = {"budget": "50%", "window": window}
    told = specs(tmp_path, [MODELS[0], *lenders])
    assert {name: spec and spec.retry_after_s for name, spec in told.items()} == {
        MODELS[0]["name"]: 120.0,
        "lender0": 0.0,
        "lender1": 0.0,
    }


def test_what_the_node_says_holds_for_every_engine(tmp_path: Path) -> None:
    told = specs(tmp_path, lending={"transport": "p2p", "stream_buffers": 1, "max_programs": 7, "max_wait": "2s"})
    for spec in filter(None, told.values()):
        assert (spec.transport, spec.stream_buffers, spec.max_programs, spec.max_wait_s) == ("p2p", 1, 7, 2.0)
        assert spec.rendezvous == "/run/ipc"


@pytest.mark.parametrize(
    ("models", "node"),
    [
        (MODELS, {"lending": "off"}),
        ([MODELS[0], MODELS[4]], {}),
        ([MODELS[0], MODELS[2]], {}),
        ([MODELS[1], MODELS[3]], {}),
        # 64 tokens of a block against 16: one extent is more than the pool of one block.
        ([{**MODELS[0], "kv_cache": {"memory": "1MiB", "block_size": 64}},
          {**MODELS[1], "kv_cache": {"memory": "17KiB"}}], {}),
    ],
    ids=["lending is off", "no budget", "no worker", "no master", "an extent is more than the pool"],
)  # fmt: skip
def test_nobody_has_a_part_in_lending(models: list[dict[str, Any]], node: dict[str, Any], tmp_path: Path) -> None:
    assert set(specs(tmp_path, models, **node).values()) == {None}


def test_an_engine_reads_what_it_is_told(tmp_path: Path) -> None:
    config, plans = planned(tmp_path, MODELS)
    told = compiled(config, plans)[0]
    assert msgspec.json.decode(msgspec.json.encode(told), type=EngineConfig) == told
    assert told.max_model_len > plans[0].pool_tokens
    assert told.lending is not None


def test_a_model_without_a_budget_may_have_been_added_later(tmp_path: Path) -> None:
    config, plans = planned(tmp_path, MODELS)
    assert why_not_lend(config, plans[-1], None) == (
        "was started without a lending.budget; write one, even 0, and it can be changed while the model runs"
    )
