"""The `speculative_config` section: off unless it is there, vLLM's keys, mistakes named with their keys."""

from __future__ import annotations

import pytest

from swiftkv.config import parse_config
from swiftkv.errors import ConfigError
from swiftkv.model_config import ModelConfig
from swiftkv.speculative_config import SpeculativeConfig


def model(speculative_config: object, **options: object) -> ModelConfig:
    section = {"name": "m", "path": "somewhere", "speculative_config": speculative_config, **options}
    return parse_config({"models": [section]}).models[0]


@pytest.mark.parametrize("off", [None, False, "off"])
def test_there_are_no_drafts_unless_the_section_is_there(off: object) -> None:
    assert model(off).speculative_config is None
    assert model({}).speculative_config == SpeculativeConfig()


def test_vllms_keys_are_taken() -> None:
    keys = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 3, "prompt_lookup_max": 3}
    drafts = model(keys).speculative_config
    assert drafts is not None
    assert drafts.model_dump() == keys


def test_steps_of_a_model_with_drafts_are_not_planned_ahead() -> None:
    assert model(None, device="cuda:0").plans_ahead
    assert not model({}, device="cuda:0").plans_ahead
    assert not model({}).plans_ahead
    assert not model({}, device="cuda:0", async_scheduling=False).plans_ahead


@pytest.mark.parametrize(
    ("section", "options", "mistake"),
    [
        ({"method": "eagle"}, {}, "method: 'eagle' is not ngram, the only method there is"),
        ({"num_speculative_tokens": 0}, {}, "num_speculative_tokens: 0 is not an integer from 1 to 64"),
        ({"num_speculative_tokens": 65}, {}, "num_speculative_tokens: 65 is not an integer from 1 to 64"),
        ({"prompt_lookup_min": 0}, {}, "prompt_lookup_min: 0 is not an integer from 1 to 64"),
        ({"prompt_lookup_max": 65}, {}, "prompt_lookup_max: 65 is not an integer from 1 to 64"),
        ({"prompt_lookup_min": 9}, {}, "prompt_lookup_min: 9 is more than prompt_lookup_max (8); lower it or raise"),
        ({}, {"task": "embed"}, "num_speculative_tokens: a model with task: embed generates no tokens; drop"),
        ({}, {"async_scheduling": True}, "num_speculative_tokens: with async_scheduling: true a step begins before"),
    ],
)
def test_a_mistake_is_told_with_its_key(section: object, options: dict[str, object], mistake: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(section, **options)
    assert f"models[0].speculative_config.{mistake}" in str(caught.value)
