"""Host memory: the models that share it, its size, and how much there may be of it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from swiftkv.config import load_config
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine_configs import compile_engines
from swiftkv.errors import ConfigError
from swiftkv.host_tiers import HostTiers, check_fits_machine, check_host_memory
from swiftkv.planning.models import SizedPlan
from swiftkv.planning.node import plan_node
from tests.support.checkpoints import make_checkpoint
from tests.support.storage import opened


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two directories with the same files, and one with equal ones."""
    directory = tmp_path_factory.mktemp("host-tiers")
    make_checkpoint(directory / "weights", "llama", tokenizer=True)
    (directory / "other-name").symlink_to(directory / "weights")
    shutil.copytree(directory / "weights", directory / "copy")
    return directory


def plan(directory: Path, *models: str) -> tuple[list[SizedPlan], list[EngineConfig]]:
    lines = [f"- {{name: m{i}, kv_cache: {{memory: 8MiB}}, {model}}}" for i, model in enumerate(models)]
    (directory / "node.yaml").write_text("models:\n" + "\n".join(lines))
    config = load_config(directory / "node.yaml")
    plans = plan_node(config, need_weights=True)
    engines = compile_engines(config, plans, {}, directory, {plan.name: i for i, plan in enumerate(plans)})
    return [plan for plan in plans if isinstance(plan, SizedPlan)], list(engines)


def test_a_ratio_counts_from_the_pool(directory: Path) -> None:
    (a, b, c), _ = plan(
        directory,
        "path: weights, tiers: {host: {ratio: 2.0}}",
        "path: weights, tiers: {host: {size: 3MiB}}",
        "path: weights",
    )
    assert (a.host_bytes, b.host_bytes, c.host_bytes) == (2 * a.pool_bytes, 3 << 20, None)
    assert a.host_tokens is not None
    assert 1.8 * a.pool_tokens < a.host_tokens <= 2 * a.pool_tokens
    assert c.host_tokens is None


def test_models_with_the_same_files_share_what_they_bring_together(directory: Path) -> None:
    plans, engines = plan(
        directory,
        "path: weights, tiers: {host: {size: 3MiB}}",
        "path: other-name, tiers: {host: {size: 5MiB}}",
        "path: copy, tiers: {host: {size: 7MiB}}",
        "path: weights",
    )
    tiers = HostTiers()
    equipped = [tiers.equip(p, engine, plans) for p, engine in zip(plans, engines, strict=True)]
    fds = [engine.inherited_fds for engine in equipped]
    assert fds[0] == fds[1] != fds[2]
    assert fds[3] == ()
    assert [os.fstat(fd).st_size for (fd,) in fds[:3]] == [8 << 20, 8 << 20, 7 << 20]
    with opened({"backend": "host", "file": f"/proc/self/fd/{fds[0][0]}"}) as backend:
        usage = backend.usage()
        assert usage is not None
        assert usage.bound_bytes is not None
        assert 0.9 * (8 << 20) < usage.bound_bytes <= 8 << 20
    tiers.release("m0")
    assert os.fstat(fds[1][0]).st_size == 8 << 20
    for name in ("m1", "m2", "m3"):
        tiers.release(name)
    for (fd,) in fds[:3]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_memory_smaller_than_a_block_is_a_mistake(directory: Path) -> None:
    plans, (engine,) = plan(directory, "path: weights, tiers: {host: {size: 4KiB}}")
    with pytest.raises(ConfigError, match=r"tiers.host: no block of m0 fits into 4KiB"):
        HostTiers().equip(plans[0], engine, plans)


def test_pools_larger_than_the_machine_are_a_mistake(directory: Path) -> None:
    plans, _ = plan(directory, "path: weights", "path: copy")
    taken_bytes = sum(plan.pool_bytes + plan.weight_bytes for plan in plans)
    check_fits_machine(plans, taken_bytes)
    with pytest.raises(ConfigError, match=r"kv_cache.memory: m0, m1: pools of .* weights of .* are more than the "):
        check_fits_machine(plans, taken_bytes - 1)


def test_more_than_the_machine_leaves_is_a_mistake(directory: Path) -> None:
    plans, _ = plan(directory, "path: weights, tiers: {host: {size: 8MiB}}", "path: copy, tiers: {host: {size: 8MiB}}")
    taken_bytes = sum(plan.pool_bytes + plan.weight_bytes for plan in plans)
    check_host_memory(plans, taken_bytes + (20 << 20))
    with pytest.raises(ConfigError, match=r"tiers.host: the models ask for 16MiB of host memory together.* 80 % of"):
        check_host_memory(plans, taken_bytes + (20 << 20) - 2)
    with pytest.raises(ConfigError, match="80 % of the rest is 0B"):
        check_host_memory(plans, taken_bytes - 1)
