"""The section of one model in the YAML file."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from swiftkv.compute_config import ComputeConfig
from swiftkv.config_fields import (
    COUNT_OR_NULL,
    DURATION,
    LIMIT,
    PORT,
    POSITIVE,
    Limit,
    Port,
    Positive,
    Section,
    read_off,
)
from swiftkv.kv_events_config import KVEventsConfig
from swiftkv.policies import SchedulingPolicy, Task
from swiftkv.speculative_config import SpeculativeConfig
from swiftkv.tier_config import TiersConfig
from swiftkv.units import Budget, PoolBytes, PoolMemory, parse_budget, parse_duration, parse_memory, parse_part

BUDGET_FORMS = "a percentage of the pool up to 100% such as 75%, a size such as 128MiB, or 0"
LONGEST_NAME = 64
_SERVED_NAMES = "a name, or a list of names, each of 1 to 256 characters without blanks"
_SERVED_NAME = re.compile(r"[!-~]{1,256}")
_MEMORY = "a size such as 256MiB or 1GiB (1.074 GB), a number of bytes, or a part of a GPU such as 60%"
_CPU_STEP_LIMIT_S = 0.25
ToolParserName = Literal[
    "hermes",
    "llama3_json",
    "pythonic",
    "xlam",
    "mistral",
    "qwen3_coder",
    "nemotron_json",
    "apriel",
    "deepseek_v3",
    "functiongemma",
    "gpt_oss",
]
_DUE_S = 10.0


def _read_dimensions(value: object) -> Literal["any"] | tuple[int, ...] | None:
    if value is None or value == "any":
        return value
    if not isinstance(value, list) or not value or not all(type(number) is int and number > 0 for number in value):
        raise ValueError("not dimensions")
    return tuple(value)


def _read_names(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not all(isinstance(name, str) and _SERVED_NAME.fullmatch(name) for name in names):
        raise ValueError("not names")
    return tuple(dict.fromkeys(names))


class KVCacheConfig(Section):
    """The pool of one engine."""

    memory: Annotated[PoolMemory, PlainValidator(parse_memory)] = Field(PoolBytes(512 << 20), description=_MEMORY)
    block_size: Annotated[int, Field(gt=0, multiple_of=16)] = Field(16, description="a multiple of 16 tokens")
    retention_interval: Positive | None = Field(None, description="a number of tokens, or null")
    max_pinned: Annotated[float, PlainValidator(parse_part)] = Field(0.25, description="a percentage such as 25%")


class LendingConfig(Section):
    """The part of a worker's pool that masters may borrow, and how the worker judges its own needs."""

    budget: Annotated[Budget, PlainValidator(parse_budget)] = Field(Budget(0), description=BUDGET_FORMS)
    window: Annotated[float, BeforeValidator(parse_duration), Field(gt=0)] = Field(60.0, description=DURATION)
    policy: Literal["total", "longest"] = Field("total", description="total or longest")


class EndpointConfig(Section):
    """A model's own port."""

    port: Port = Field(description=PORT)


class ModelConfig(Section):
    """One model, one engine process."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=LONGEST_NAME,
        description="a name of letters, digits, '.', '_' and '-', at most 64 (it is part of a URL)",
    )
    served_model_name: Annotated[tuple[str, ...], PlainValidator(_read_names)] = Field((), description=_SERVED_NAMES)
    path: str = Field(min_length=1, description="a directory in Hugging Face format, or a hub id")
    revision: str | None = Field(None, min_length=1, description="a branch, a tag or a commit of the hub, or null")
    task: Task = Field("generate", description="generate, embed or score")
    matryoshka_dimensions: Annotated[Literal["any"] | tuple[int, ...] | None, PlainValidator(_read_dimensions)] = Field(
        None, description="any, a list of integers of at least 1, or null"
    )
    role: Literal["master", "worker"] = Field("worker", description="master or worker")
    device: str = Field("cpu", pattern=r"^(cpu|cuda:\d+)$", description="cpu or cuda:N")
    tensor_parallel_size: Annotated[int, Field(ge=1, le=8)] = Field(1, description="an integer from 1 to 8")
    dtype: Literal["float32", "float16", "bfloat16"] = Field("bfloat16", description="float32, float16 or bfloat16")
    threads: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)), ge=1, le=4096, description="an integer from 1 to 4096"
    )
    max_model_len: Positive | None = Field(None, description=POSITIVE)
    max_num_seqs: Positive = Field(64, description=POSITIVE)
    max_num_batched_tokens: Positive = Field(2048, description=POSITIVE)
    scheduling_policy: SchedulingPolicy = Field("hrrn", description="fcfs, priority, spf, hrrn, turns or deadline")
    max_num_queued_reqs: Positive = Field(1024, description=POSITIVE)
    max_num_queued_tokens: Positive | None = Field(None, description=COUNT_OR_NULL)
    target_ttft: Limit = Field(None, description=LIMIT)
    target_tpot: Limit = Field(None, description=LIMIT)
    long_prefill_token_threshold: Positive | None = Field(None, description=COUNT_OR_NULL)
    max_num_partial_prefills: Positive | None = Field(None, description=COUNT_OR_NULL)
    max_long_partial_prefills: Positive = Field(1, description=POSITIVE)
    enable_prefix_caching: bool = Field(True, description="true or false")
    enable_chunked_prefill: bool = Field(True, description="true or false")
    enforce_eager: bool = Field(False, description="true or false")
    async_scheduling: bool | None = Field(None, description="true or false")
    speculative_config: Annotated[SpeculativeConfig | None, BeforeValidator(read_off)] = Field(
        None, description="off or a mapping"
    )
    split_special_tokens: bool = Field(False, description="true or false")
    tool_parser: ToolParserName | None = Field(None, description=f"{', '.join(get_args(ToolParserName))} or null")
    reasoning_parser: Literal["qwen3", "deepseek_r1", "mistral", "gpt_oss", "none"] | None = Field(
        None, description="qwen3, deepseek_r1, mistral, gpt_oss, none or null"
    )
    trust_request_chat_template: bool = Field(False, description="true or false")
    generation_config: str = Field("auto", min_length=1, description="auto, vllm or a directory")
    auto_wake: bool = Field(False, description="true or false")
    kv_cache: KVCacheConfig = Field(default_factory=KVCacheConfig, description="a mapping")
    lending: LendingConfig | None = Field(None, description="a mapping")
    compute: Annotated[ComputeConfig | None, BeforeValidator(read_off)] = Field(
        default_factory=ComputeConfig, description="off or a mapping"
    )
    tiers: TiersConfig | None = Field(None, description="a mapping")
    kv_events_config: KVEventsConfig = Field(default_factory=KVEventsConfig, description="a mapping")
    endpoint: EndpointConfig | None = Field(None, description="a mapping")

    @model_validator(mode="before")
    @classmethod
    def _larger_blocks_on_gpus(cls, value: object) -> object:
        """Give models on GPUs blocks of 64 tokens: the tensor memory accelerator fetches that many keys at once."""
        if not isinstance(value, dict) or not str(value.get("device", "cpu")).startswith("cuda"):
            return value
        kv_cache = value.get("kv_cache", {})
        return {**value, "kv_cache": {"block_size": 64} | kv_cache} if isinstance(kv_cache, dict) else value

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which clients may ask for the model, its own first."""
        return tuple(dict.fromkeys((self.name, *self.served_model_name)))

    def why_not_below(self, tier: Literal["host", "storage"]) -> Iterator[str]:
        """Yield the reasons why the model cannot have a `tier` below its pool, each with its remedy."""
        otherwise = f"or tiers: {{{tier}: off}} for this model"
        if self.device != "cpu" and self.tensor_parallel_size > 1:
            yield (
                f"KV of several ranks on GPUs (tensor_parallel_size {self.tensor_parallel_size}) is not stored in this "
                f"version; write tensor_parallel_size: 1, {otherwise}"
            )
        if not self.enable_prefix_caching:
            yield f"without prefix caching, stored KV is never found; write enable_prefix_caching: true, {otherwise}"

    @property
    def plans_ahead(self) -> bool:
        """Whether a step is planned while the one before it is computed: on GPUs, unless the file says otherwise.

        On the CPU the host computes itself, so planning ahead would gain nothing. A draft follows the last token, which
        is not known until the step before is over.
        """
        if self.async_scheduling is None:
            return self.device != "cpu" and self.speculative_config is None
        return self.async_scheduling

    def why_no_drafts(self) -> Iterator[str]:
        """Yield the mistakes in `speculative_config`, each with its remedy."""
        drafts = self.speculative_config
        if drafts is None:
            return
        if drafts.prompt_lookup_min > drafts.prompt_lookup_max:
            yield (
                f"prompt_lookup_min: {drafts.prompt_lookup_min} is more than prompt_lookup_max "
                f"({drafts.prompt_lookup_max}); lower it or raise prompt_lookup_max"
            )
        if self.task != "generate":
            yield f"num_speculative_tokens: a model with task: {self.task} generates no tokens; drop speculative_config"
        if self.plans_ahead:
            yield (
                "num_speculative_tokens: with async_scheduling: true a step begins before the last token is known, and "
                "drafts follow that; write async_scheduling: false, or drop speculative_config"
            )

    @property
    def step_limit_s(self) -> float | None:
        """The most seconds of a step with answers: `target_tpot`, or without it in the file, the device's default.

        On the CPU a full step of prompts takes seconds, in which no answer goes on; on a GPU it takes milliseconds.
        """
        is_usual = self.device == "cpu" and "target_tpot" not in self.model_fields_set
        return _CPU_STEP_LIMIT_S if is_usual else self.target_tpot

    @property
    def share(self) -> ComputeConfig | None:
        """The model's share of the cores, or of its GPU if the file has one; `None` if the model waits for no other."""
        return self.compute if self.device == "cpu" or "compute" in self.model_fields_set else None

    @property
    def due_s(self) -> float:
        """The seconds until the first token of a request without a target is due, for `scheduling_policy: deadline`."""
        return self.target_ttft or _DUE_S

    @property
    def last_gpu(self) -> int:
        """The last GPU index that this model uses, one for each rank from `device` on; -1 on the CPU."""
        return -1 if self.device == "cpu" else int(self.device.removeprefix("cuda:")) + self.tensor_parallel_size - 1
