"""The `compute` section: mistakes are named with their keys."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkv.compute_config import ComputeConfig
from swiftkv.config import parse_config
from swiftkv.errors import ConfigError
from swiftkv.model_config import ModelConfig


def model(**options: Any) -> ModelConfig:
    return parse_config({"models": [{"name": "chat", "path": "somewhere", **options}]}).models[0]


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        ({"compute": {"weight": 0}}, "models[0].compute.weight: 0 is not an integer from 1 to 100"),
        ({"compute": {"weight": 101}}, "models[0].compute.weight: 101 is not an integer from 1 to 100"),
        ({"compute": {"weight": "2"}}, "models[0].compute.weight: '2' is not an integer from 1 to 100"),
        ({"compute": {"max_share": 0.5}}, "models[0].compute.max_share: 0.5 is not a percentage of the cores from 5%"),
        ({"compute": {"max_share": "4%"}}, "models[0].compute.max_share: '4%' is not a percentage"),
        ({"compute": {"max_share": "101%"}}, "models[0].compute.max_share: '101%' is not a percentage"),
        ({"compute": {"nice": 2}}, "models[0].compute.nice: unknown key; the keys here are weight, max_share"),
        ({"compute": "half"}, "models[0].compute: 'half' is not off or a mapping"),
        (
            {
                "compute": {"weight": 2},
                "device": "cuda:0",
                "kv_cache": {"memory": "1GiB"},
                "tensor_parallel_size": 2,
            },
            "models[0].compute: a model on several GPUs (tensor_parallel_size 2) takes no turns on them in this "
            "version; drop this, or write tensor_parallel_size: 1",
        ),
    ],
)
def test_a_mistake_is_named(options: dict[str, Any], mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(**options)
    assert mistake in str(caught.value)


def test_models_on_the_cores_share_them_alike_unless_they_say_otherwise_and_those_on_gpus_if_they_say_so() -> None:
    models = [
        {"name": "chat", "path": "somewhere"},
        {"name": "code", "path": "somewhere", "compute": "off"},
        {"name": "draw", "path": "somewhere", "device": "cuda:0", "kv_cache": {"memory": "1GiB"}},
        {
            "name": "read",
            "path": "somewhere",
            "device": "cuda:0",
            "kv_cache": {"memory": "1GiB"},
            "compute": {"weight": 2},
        },
    ]
    assert [of.share for of in parse_config({"models": models}).models] == [
        ComputeConfig(),
        None,
        None,
        ComputeConfig(weight=2),
    ]


def test_what_is_written_is_read() -> None:
    assert model(compute={}).compute == ComputeConfig(weight=1, max_share="100%")
    assert model(compute={"weight": 3, "max_share": "62.5%"}).compute == ComputeConfig(weight=3, max_share="62.5%")
    assert model(compute={"max_share": "62.5%"}).compute.max_share == 0.625  # type: ignore[union-attr]
    assert model(compute=False).compute is None
    assert model(compute="off", device="cuda:0").compute is None
