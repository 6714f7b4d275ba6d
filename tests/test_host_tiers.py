"""Host memory: the models that share it, its size, and how much there may be of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from swiftkv._host import MAX_MEMBERS, HostMemory
from swiftkv.config import load_config
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine_configs import compile_engines
from swiftkv.errors import ConfigError
from swiftkv.host_tiers import HostTiers, check_fits_machine
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.planning.node import plan_node
from swiftkv.storage.host_medium import HostMedium, map_host_memory
from tests.support.checkpoints import make_checkpoint
from tests.support.storage import opened, soon


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two directories with the same files, and one with equal ones."""
    directory = tmp_path_factory.mktemp("host-tiers")
    make_checkpoint(directory / "weights", "llama", tokenizer=True)
    (directory / "other-name").symlink_to(directory / "weights")
    shutil.copytree(directory / "weights", directory / "copy")
    return directory


def plan_of_gpu(directory: Path, options: str) -> tuple[ModelPlan, EngineConfig]:
    """Return the plan of a model whose pool is a part of a GPU."""
    model = f"{{name: gpu, path: weights, device: 'cuda:0', kv_cache: {{memory: 60%}}, {options}}}"
    (directory / "node.yaml").write_text(f"models: [{model}]")
    config = load_config(directory / "node.yaml")
    plans = plan_node(config, need_weights=True)
    (engine,) = compile_engines(config, plans, {}, directory, {"gpu": 0})
    return plans[0], engine


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


def check_sums(tiers: HostTiers, plans: Sequence[SizedPlan], host_bytes: int) -> None:
    """Check that `plans` need these bytes of host memory."""
    taken_bytes = sum(plan.pool_bytes + plan.weight_bytes for plan in plans)
    tiers.check(plans, taken_bytes + host_bytes * 5 // 4)
    with pytest.raises(ConfigError, match=r"tiers.host: the models ask for"):
        tiers.check(plans, taken_bytes + host_bytes * 5 // 4 - 2)


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
    check_sums(tiers, plans[1:], 15 << 20)  # its memory stays while another model uses it
    check_sums(tiers, plans, 15 << 20)  # and it finds that again
    for name in ("m1", "m2", "m3"):
        tiers.release(name)
    for (fd,) in fds[:3]:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_a_model_keeps_its_memory_when_its_files_are_replaced(directory: Path) -> None:
    """It serves the old ones until it is started again; the directory may even be gone."""
    shutil.copytree(directory / "weights", directory / "served")
    (served, new), engines = plan(
        directory,
        "path: served, tiers: {host: {size: 3MiB}}",
        "path: copy, tiers: {host: {size: 5MiB}}",
    )
    tiers = HostTiers()
    tiers.equip(served, engines[0], [served])
    shutil.rmtree(directory / "served")
    check_sums(tiers, [served, new], 8 << 20)
    shutil.copytree(directory / "copy", directory / "served", copy_function=os.link)
    (fd,) = tiers.equip(new, engines[1], [served, new]).inherited_fds
    assert os.fstat(fd).st_size == 5 << 20
    tiers.release("m0")
    tiers.release("m1")


def test_a_model_has_a_number_in_its_memory_until_it_goes(directory: Path) -> None:
    plans, engines = plan(directory, *["path: weights, tiers: {host: {size: 1MiB}}"] * 3)
    tiers = HostTiers()

    def member_of(number: int) -> int:
        equipped = tiers.equip(plans[number], engines[number], plans)
        assert equipped.storage is not None
        assert equipped.storage.host_fd is not None
        fds.append(equipped.storage.host_fd)
        return equipped.storage.host_member

    fds: list[int] = []
    assert [member_of(number) for number in (0, 1, 2)] == [0, 1, 2]
    assert member_of(1) == 1
    medium, watcher = HostMedium.of(fds[0], 1), HostMemory(map_host_memory(fds[0]), MAX_MEMBERS - 1)
    medium.write([bytes(32)], [(memoryview(b""), memoryview(b"block"))], soon())
    assert medium.pin([bytes(32)], 5, soon()) == [0]
    tiers.release("m0")
    assert watcher.pinned_by([0]) == [0b10]
    tiers.release("m1")  # its engine has ended, whatever it left
    assert watcher.pinned_by([0]) == [0]
    assert [member_of(number) for number in (1, 0)] == [0, 1]
    for name in ("m0", "m1", "m2"):
        tiers.release(name)


def test_a_model_beyond_the_members_of_a_memory_is_a_mistake(directory: Path) -> None:
    plans, (engine,) = plan(directory, "path: weights, tiers: {host: {size: 1MiB}}")
    named = [replace(plans[0], name=f"m{number}") for number in range(MAX_MEMBERS + 1)]
    tiers = HostTiers()
    for each in named[:-1]:
        tiers.equip(each, engine, named[:1])
    with pytest.raises(ConfigError, match=r"tiers.host: m64: 64 models with these files share host memory"):
        tiers.equip(named[-1], engine, named[:1])
    for each in named:
        tiers.release(each.name)


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
    HostTiers().check(plans, taken_bytes + (20 << 20))
    with pytest.raises(ConfigError, match=r"tiers.host: the models ask for 16MiB of host memory together.* 80 % of"):
        HostTiers().check(plans, taken_bytes + (20 << 20) - 2)
    with pytest.raises(ConfigError, match="80 % of the rest is 0B"):
        HostTiers().check(plans, taken_bytes - 1)


def test_a_model_on_a_gpu_takes_its_host_memory_and_what_it_pins(directory: Path) -> None:
    """Its weights and its pool lie elsewhere, and how large the pool is nobody knows before it starts."""
    on_gpu, engine = plan_of_gpu(directory, "tiers: {host: {size: 8MiB}}")
    assert not isinstance(on_gpu, SizedPlan)
    assert on_gpu.host_bytes == 8 << 20
    assert on_gpu.host_tokens is not None
    assert on_gpu.page_locked_bytes == (64 + 32) << 20
    needed_bytes = on_gpu.host_bytes + on_gpu.page_locked_bytes
    check_fits_machine([on_gpu], 0)
    HostTiers().check([on_gpu], needed_bytes * 5 // 4)
    with pytest.raises(ConfigError, match=r"104MiB of host memory together, 96MiB of it to copy from and to GPUs; "):
        HostTiers().check([on_gpu], needed_bytes * 5 // 4 - 2)
    (fd,) = HostTiers().equip(on_gpu, engine, [on_gpu]).inherited_fds
    assert os.fstat(fd).st_size == 8 << 20
    os.close(fd)


def test_only_a_model_on_a_gpu_with_a_tier_pins_memory(directory: Path) -> None:
    (on_host,), _ = plan(directory, "path: weights, tiers: {host: {size: 8MiB}}")
    assert on_host.page_locked_bytes == 0
    assert plan_of_gpu(directory, "max_num_seqs: 8")[0].page_locked_bytes == 0
    stores, _ = plan_of_gpu(directory, "tiers: {storage: {path: kv, size: 1GiB, queue: 100MiB}}")
    assert (stores.host_bytes, stores.page_locked_bytes) == (None, (128 + 32) << 20)
