"""The `tiers` section: mistakes are named with their keys; models take the node's storage unless they have theirs."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftkv.config import Config, load_config
from swiftkv.errors import ConfigError


def file(options: str = "") -> str:
    return f"{{storage: {{backend: file, path: kv, size: 1GiB{options}}}}}"


def load(directory: Path, text: str) -> Config:
    (directory / "node.yaml").write_text(text)
    return load_config(directory / "node.yaml")


def one_model(tiers: str, options: str = "") -> str:
    return f"models: [{{name: chat, path: somewhere, tiers: {tiers}{options}}}]"


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        (one_model("{disk: {}}"), "models[0].tiers.disk: unknown key; the keys here are host, storage"),
        (
            one_model("{storage: {backend: tape}}"),
            "models[0].tiers.storage.backend: 'tape' is not one of",
        ),
        (
            one_model("{storage: {backend: file, size: 1GiB}}"),
            "models[0].tiers.storage.path: missing; write a directory",
        ),
        (one_model("{storage: {path: kv, size: 1GB}}"), "models[0].tiers.storage.size: '1GB' is not a size such as"),
        (
            one_model(file(", write_policy: write_around")),
            "models[0].tiers.storage.write_policy: 'write_around' is not write_through, write_through_selective or "
            "write_back",
        ),
        (
            one_model(file(", prefetch_policy: never")),
            "models[0].tiers.storage.prefetch_policy: 'never' is not timeout, best_effort or wait_complete",
        ),
        (
            one_model(file(", prefetch_threshold: 0")),
            "models[0].tiers.storage.prefetch_threshold: 0 is not a number of tokens, at least 1",
        ),
        (
            one_model(file(), ", enable_prefix_caching: false"),
            "models[0].tiers.storage: without prefix caching, stored KV is never found",
        ),
        (
            one_model(file(), ", device: 'cuda:0', tensor_parallel_size: 2"),
            "models[0].tiers.storage: KV of several ranks on GPUs (tensor_parallel_size 2) is not stored in this ",
        ),
        (
            one_model("{host: {ratio: 1.0e+300}}"),
            "models[0].tiers.host.ratio: 1e+300 is more than 1000000, the most that can be written here",
        ),
        (
            one_model("{host: {size: 99999999TiB}}"),
            "models[0].tiers.host.size: '99999999TiB' is more than 1EiB, the most that can",
        ),
        (one_model("{host: {}}"), "models[0].tiers.host: {} is not off, or a mapping with either size or ratio"),
        (
            one_model("{host: {size: 1GiB, ratio: 2.0}}"),
            "models[0].tiers.host: {'ratio': 2.0, 'size': '1GiB'} is not off, or a mapping with either",
        ),
        (one_model("{host: {ratio: 0}}"), "models[0].tiers.host.ratio: 0 is not the size as a multiple of the pool's"),
        (one_model("{host: 8GiB}"), "models[0].tiers.host: '8GiB' is not off, or a mapping with either"),
        (
            one_model("{host: {ratio: 2.0}}", ", device: 'cuda:0', tensor_parallel_size: 4"),
            "models[0].tiers.host: KV of several ranks on GPUs (tensor_parallel_size 4) is not stored in this version; "
            "write tensor_parallel_size: 1, or tiers: {host: off} for this model",
        ),
        (
            one_model("{host: {ratio: 2.0}}", ", device: 'cuda:0', kv_cache: {memory: 60%}"),
            "models[0].tiers.host.ratio: 60% of a GPU is known in bytes only when the model is loaded, and host memory "
            "is made before that; write a size instead",
        ),
        (
            "node: {tiers: {storage: {path: kv}}}\nmodels: [{name: chat, path: somewhere}]",
            "node.tiers.storage.size: missing",
        ),
        (
            f"node: {{tiers: {file()}}}\nmodels: [{{name: a, path: b, device: 'cuda:0', tensor_parallel_size: 2}}]",
            "models[0].tiers.storage: KV of several ranks on GPUs",
        ),
    ],
)
def test_a_mistake_is_told_with_its_key(tmp_path: Path, text: str, mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert mistake in str(caught.value)


def test_models_have_the_nodes_storage_unless_they_have_theirs(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        f"node: {{tiers: {file(', prefetch_timeout_base: 500ms')}}}\n"
        "models:\n- {name: a, path: m}\n- {name: b, path: m, tiers: {storage: off}}\n"
        f"- {{name: c, path: m, tiers: {file(', prefetch_policy: wait_complete, queue: 8MiB')}}}",
    )
    a, b, c = (config.storage_of(model) for model in config.models)
    assert a is not None
    assert a.backend == {"backend": "file", "path": "kv", "size": "1GiB"}
    assert (a.write_policy, a.prefetch_policy, a.prefetch_timeout_base) == ("write_through", "timeout", 0.5)
    assert b is None
    assert c is not None
    assert (c.prefetch_policy, c.queue) == ("wait_complete", 8 << 20)


def test_a_model_on_a_gpu_has_host_memory_and_storage(tmp_path: Path) -> None:
    options = ", device: 'cuda:0', kv_cache: {memory: 60%}"
    config = load(tmp_path, one_model("{host: {size: 8GiB}, storage: {path: kv, size: 1GiB}}", options))
    (model,) = config.models
    host = config.host_of(model)
    assert host is not None
    assert host.bytes_for(None) == 8 << 30
    assert config.storage_of(model) is not None
    assert [*model.why_not_below("host"), *model.why_not_below("storage")] == []


def test_without_the_section_there_is_no_storage(tmp_path: Path) -> None:
    config = load(tmp_path, "models: [{name: chat, path: somewhere}]")
    assert config.storage_of(config.models[0]) is None


def test_host_memory_may_stand_alone_and_for_all_models(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "node: {tiers: {host: {ratio: 2.0}}}\n"
        "models:\n- {name: a, path: m}\n- {name: b, path: m, tiers: {host: off}}\n"
        "- {name: c, path: m, tiers: {host: {size: 8GiB}}}",
    )
    sizes = [host and host.bytes_for(1000) for host in map(config.host_of, config.models)]
    assert sizes == [2000, None, 8 << 30]
    assert [config.storage_of(model) for model in config.models] == [None] * 3
