"""The YAML file as frozen, validated types. Every mistake is one line that names its key and what would be right.

It is one file, as the YAML is one: who looks for a key finds its type, its default and its checks here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator, Field, PlainValidator, PrivateAttr, ValidationError, model_validator

from swiftkv.compute_config import ComputeConfig, WrittenCompute, mistakes_about_shares, read_compute
from swiftkv.config_fields import (
    COUNT_OR_NULL,
    DURATION,
    LIMIT,
    POSITIVE,
    SIZE,
    VARIABLE,
    Duration,
    Limit,
    Positive,
    Section,
    Size,
    Variable,
)
from swiftkv.errors import ConfigError
from swiftkv.kv_events_config import KVEventsConfig, host_of
from swiftkv.mistakes import describe_mistakes, show
from swiftkv.policies import SchedulingPolicy, Task
from swiftkv.tenant_config import TenantConfig, mistakes_about_tenants
from swiftkv.tier_config import HostConfig, StorageConfig, TiersConfig, check_backends, why_not_below
from swiftkv.units import (
    Budget,
    PoolBytes,
    PoolMemory,
    format_size,
    parse_budget,
    parse_duration,
    parse_memory,
    parse_part,
)

_MEMORY = "a size such as 256MiB or 1GiB, a number of bytes, or a part of a GPU such as 60%"
_PORT = "a port number from 0 to 65535 (0 takes any free one)"
BUDGET_FORMS = "a percentage of the pool up to 100% such as 75%, a size such as 128MiB, or 0"
_MIN_KEY_LENGTH = 16
_LONGEST_NAME = 64
_CPU_STEP_LIMIT_S = 0.25
_DUE_S = 10.0

Port = Annotated[int, Field(ge=0, le=65535)]


class RestartConfig(Section):
    """How often, and how soon, an engine that died is started again."""

    limit: Annotated[int, Field(ge=0)] = Field(5, description="a number of restarts within the window, at least 0")
    window: Duration = Field(600.0, description=DURATION)
    backoff: Duration = Field(1.0, description=f"{DURATION}; it doubles with every restart in the window")


def _read_dimensions(value: object) -> Literal["any"] | tuple[int, ...] | None:
    if value is None or value == "any":
        return value
    if not isinstance(value, list) or not value or not all(type(number) is int and number > 0 for number in value):
        raise ValueError("not dimensions")
    return tuple(value)


def _read_switch(value: object) -> object:
    """PyYAML reads on and off as booleans unless they are quoted."""
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


def _read_node_lending(value: object) -> object:
    """`lending: off` is short for `lending: {enabled: off}`."""
    switch = _read_switch(value)
    return {"enabled": switch} if isinstance(switch, bool) else value


class NodeLendingConfig(Section):
    """Lending between the models of this node; what a worker lends stands with the worker."""

    enabled: Annotated[bool, BeforeValidator(_read_switch)] = Field(True, description="on or off")
    transport: Literal["auto", "shm", "peer", "p2p"] = Field("auto", description="auto, shm, peer or p2p")
    io_backend: Literal["kernel", "direct"] = Field("kernel", description="kernel or direct")
    stream_buffers: Literal[1, 2] = Field(2, description="1 or 2")
    max_programs: Positive | None = Field(None, description=POSITIVE)
    max_wait: Duration = Field(30.0, description=DURATION)


class BatchesConfig(Section):
    """The files and batches that a node keeps in its `state_dir`, and how much of a model they may take."""

    max_file: Size = Field(200 << 20, description=SIZE)
    max_requests: Positive = Field(50_000, description=POSITIVE)
    max_storage: Size = Field(10 << 30, description=SIZE)
    max_in_flight: Positive | None = Field(None, description=POSITIVE)


class OtlpConfig(Section):
    """Names the collector that traces of requests are sent to."""

    endpoint: str = Field(pattern=r"^https?://[^/]+/.+", description="a URL such as http://localhost:4318/v1/traces")


class NodeConfig(Section):
    """The process that owns the ports."""

    host: str = Field("127.0.0.1", min_length=1, description="an address to listen on, such as 127.0.0.1 or 0.0.0.0")
    port: Port = Field(8000, description=_PORT)
    api_key_env: Variable | None = Field(None, description=VARIABLE)
    admin_key_env: Variable | None = Field(None, description=VARIABLE)
    tenants: Annotated[tuple[TenantConfig, ...], Field(strict=False)] = Field(
        (), description="a list of mappings with name and api_key_env"
    )
    shutdown_timeout: Duration = Field(30.0, description=DURATION)
    allow_unauthenticated: bool = Field(False, description="true or false")
    allowed_hosts: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        (), description="a list of host names without ports"
    )
    max_connections: Positive = Field(4096, description=POSITIVE)
    max_body: Size = Field(16 << 20, description=SIZE)
    max_bodies: Size = Field(128 << 20, description=SIZE)
    watchdog: Limit = Field(120.0, description=LIMIT)
    load_timeout: Limit = Field(600.0, description=LIMIT)
    show_cached_tokens: Literal["always", "salted", "never"] = Field("always", description="always, salted or never")
    allow_priority: bool = Field(False, description="true or false")
    request_log: str | None = Field(None, min_length=1, description="a file to append to, or null")
    otlp: OtlpConfig | None = Field(None, description="a mapping")
    state_dir: str | None = Field(None, min_length=1, description="a directory, or null")
    batches: BatchesConfig = Field(default_factory=BatchesConfig, description="a mapping")
    restart: RestartConfig = Field(default_factory=RestartConfig, description="a mapping")
    lending: Annotated[NodeLendingConfig, BeforeValidator(_read_node_lending)] = Field(
        default_factory=NodeLendingConfig, description="on, off or a mapping"
    )
    tiers: TiersConfig = Field(default_factory=TiersConfig, description="a mapping")

    def api_key(self) -> str | None:
        """Return the key of the OpenAI routes, from the environment.

        Raises `ConfigError` if it is named but not set, or short.
        """
        return _key_in("api_key_env", self.api_key_env)

    def admin_key(self) -> str | None:
        """Return the configured key of `/admin`.

        Raises `ConfigError` if it is named but not set, short, or the models' key.
        """
        key = _key_in("admin_key_env", self.admin_key_env)
        others = {self.api_key(): self.api_key_env}
        others |= {other: tenant.api_key_env for other, tenant in self.tenant_keys().items()}
        if key is not None and key in others:
            raise ConfigError(
                f"node.admin_key_env: {self.admin_key_env} holds the same key as {others[key]}, which must not "
                "open /admin; set another"
            )
        return key

    @property
    def key_variables(self) -> tuple[str, ...]:
        """The environment variables that hold the keys of the OpenAI routes."""
        own = () if self.api_key_env is None else (self.api_key_env,)
        return (*own, *(tenant.api_key_env for tenant in self.tenants))

    def tenant_keys(self) -> dict[str, TenantConfig]:
        """Return the tenants by their keys, which are in the environment.

        Raises `ConfigError` for a key that is not set, or short, or another tenant's.
        """
        tenants: dict[str, TenantConfig] = {}
        for i, tenant in enumerate(self.tenants):
            option = f"tenants[{i}].api_key_env"
            key = _key_in(option, tenant.api_key_env)
            assert key is not None
            if key in tenants:
                raise ConfigError(
                    f"node.{option}: {tenant.api_key_env} holds the same key as {tenants[key].api_key_env}; give each "
                    "tenant its own"
                )
            tenants[key] = tenant
        return tenants

    def check_access(self) -> None:
        """Raises `ConfigError` if the keys are not right, or if others can reach the node and it has none."""
        self.admin_key()
        if not self.key_variables and not self.is_loopback and not self.allow_unauthenticated:
            raise ConfigError(
                f"node.host: {self.host} can be reached from other machines, and the node has no API key; name the "
                "environment variable that holds one in node.api_key_env, or let everybody in with "
                "node.allow_unauthenticated: true (swiftkv serve --allow-unauthenticated)"
            )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the node."""
        return is_loopback(self.host)

    @property
    def checked_hosts(self) -> tuple[str, ...] | None:
        """The names that requests may be sent to beside this machine's own; `None` allows any.

        A browser that is misled about a name sends no key, so where a key is asked for, the name may be any.
        """
        is_keyless = not self.key_variables and self.is_loopback
        return self.allowed_hosts if is_keyless or self.allowed_hosts else None


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine, and nobody else can reach it there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key_in(option: str, variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ConfigError(
            f"node.{option}: the environment variable {variable} is not set; "
            f"export {variable}=… first{'' if option.startswith('tenants') else ', or write null for no key'}"
        )
    if len(key) < _MIN_KEY_LENGTH:
        raise ConfigError(
            f"node.{option}: the key in {variable} has {len(key)} characters, which can be guessed; it must have at "
            f"least {_MIN_KEY_LENGTH}, for example from: openssl rand -hex 16"
        )
    return key


class KVCacheConfig(Section):
    """The pool of one engine."""

    memory: Annotated[PoolMemory, PlainValidator(parse_memory)] = Field(PoolBytes(512 << 20), description=_MEMORY)
    block_size: Annotated[int, Field(gt=0, multiple_of=16)] = Field(16, description="a multiple of 16 tokens")
    retention_interval: Annotated[int, Field(gt=0)] | None = Field(None, description="a number of tokens, or null")
    max_pinned: Annotated[float, PlainValidator(parse_part)] = Field(0.25, description="a percentage such as 25%")


class LendingConfig(Section):
    """The part of a worker's pool that masters may borrow, and how the worker judges its own needs."""

    budget: Annotated[Budget, PlainValidator(parse_budget)] = Field(Budget(0), description=BUDGET_FORMS)
    window: Annotated[float, BeforeValidator(parse_duration), Field(gt=0)] = Field(60.0, description=DURATION)
    policy: Literal["total", "longest"] = Field("total", description="total or longest")


class EndpointConfig(Section):
    """A model's own port."""

    port: Port = Field(description=_PORT)


class ModelConfig(Section):
    """One model, one engine process."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=_LONGEST_NAME,
        description="a name of letters, digits, '.', '_' and '-', at most 64 (it is part of a URL)",
    )
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
    threads: Positive = Field(default_factory=lambda: len(os.sched_getaffinity(0)), description=POSITIVE)
    max_model_len: Positive | None = Field(None, description=POSITIVE)
    max_num_seqs: Positive = Field(64, description=POSITIVE)
    max_num_batched_tokens: Positive = Field(2048, description=POSITIVE)
    scheduling_policy: SchedulingPolicy = Field("hrrn", description="fcfs, priority, spf, hrrn or deadline")
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
    split_special_tokens: bool = Field(False, description="true or false")
    tool_parser: Literal["hermes", "llama3_json", "mistral", "qwen3_coder", "gpt_oss"] | None = Field(
        None, description="hermes, llama3_json, mistral, qwen3_coder, gpt_oss or null"
    )
    reasoning_parser: Literal["qwen3", "deepseek_r1", "mistral", "gpt_oss", "none"] | None = Field(
        None, description="qwen3, deepseek_r1, mistral, gpt_oss, none or null"
    )
    trust_request_chat_template: bool = Field(False, description="true or false")
    generation_config: str = Field("auto", min_length=1, description="auto, vllm or a directory")
    auto_wake: bool = Field(False, description="true or false")
    kv_cache: KVCacheConfig = Field(default_factory=KVCacheConfig, description="a mapping")
    lending: LendingConfig | None = Field(None, description="a mapping")
    compute: Annotated[ComputeConfig | None, BeforeValidator(read_compute)] = Field(
        None, description="off or a mapping"
    )
    tiers: TiersConfig | None = Field(None, description="a mapping")
    kv_events_config: KVEventsConfig = Field(default_factory=KVEventsConfig, description="a mapping")
    endpoint: EndpointConfig | None = Field(None, description="a mapping")

    @model_validator(mode="before")
    @classmethod
    def _larger_blocks_on_gpus(cls, value: object) -> object:
        """Let the tensor memory accelerator fetch keys, 64 of a block at once, unless the file says otherwise."""
        if not isinstance(value, dict) or not str(value.get("device", "cpu")).startswith("cuda"):
            return value
        kv_cache = value.get("kv_cache", {})
        return {**value, "kv_cache": {"block_size": 64} | kv_cache} if isinstance(kv_cache, dict) else value

    @property
    def step_limit_s(self) -> float | None:
        """The longest step beside answers: `target_tpot`, or what is usual where the file does not say.

        On the CPU a full step of prompts takes seconds, and no answer goes on meanwhile; on a GPU, milliseconds.
        """
        is_usual = self.device == "cpu" and "target_tpot" not in self.model_fields_set
        return _CPU_STEP_LIMIT_S if is_usual else self.target_tpot

    @property
    def due_s(self) -> float:
        """When the first token is due of requests that do not say, for `scheduling_policy: deadline`."""
        return self.target_ttft or _DUE_S

    @property
    def last_gpu(self) -> int:
        """The last GPU index that this model uses, one for each rank from `device` on; -1 on the CPU."""
        return -1 if self.device == "cpu" else int(self.device.removeprefix("cuda:")) + self.tensor_parallel_size - 1


class Config(Section):
    """The whole file."""

    node: NodeConfig = Field(default_factory=NodeConfig, description="a mapping")
    models: Annotated[tuple[ModelConfig, ...], Field(strict=False)] = Field(description="a list of at least one model")
    _directory: Path = PrivateAttr(default_factory=Path.cwd)

    @property
    def directory(self) -> Path:
        """Where the file lies: relative paths in it start there."""
        return self._directory

    def storage_of(self, model: ModelConfig) -> StorageConfig | None:
        """Return the storage tier of a model: its own, or the node's."""
        return (model.tiers or self.node.tiers).storage

    def host_of(self, model: ModelConfig) -> HostConfig | None:
        """Return the host memory of a model: its own, or the node's."""
        return (model.tiers or self.node.tiers).host

    def with_model(self, section: object) -> Config:
        """Return this configuration with one more model, checked like those of a file.

        Raises `ConfigError` that has one line per mistake; keys are those of the section.
        """
        try:
            config = Config.model_validate({"node": self.node, "models": [*self.models, section]})
            config._directory = self._directory
            model = config.models[-1]
            check_backends({model.name: model.tiers}, self._directory / "-")
        except ValidationError as error:
            mistakes = describe_mistakes(error, Config).replace(f"models[{len(self.models)}].", "")
            raise ConfigError(mistakes) from None
        return config

    def without_model(self, name: str) -> Config:
        """Return this configuration without one of its models."""
        rest = tuple(model for model in self.models if model.name != name)
        return self.model_copy(update={"models": rest})

    @model_validator(mode="after")
    def _check_across_models(self) -> Config:
        mistakes = [] if self.models else ["models: [] is not a list of at least one model"]
        names: dict[str, str] = {}
        if self.node.max_bodies < self.node.max_body:
            mistakes.append(
                f"node.max_bodies: {format_size(self.node.max_bodies)} is less than node.max_body "
                f"({format_size(self.node.max_body)}), so that the largest body never fits; raise it or lower max_body"
            )
        ports: dict[int, str] = {self.node.port: "node.port"}
        for i, model in enumerate(self.models):
            if model.name in names:
                mistakes.append(f"models[{i}].name: '{model.name}' is taken by {names[model.name]}; give each its own")
            names.setdefault(model.name, f"models[{i}].name")
            if model.endpoint is not None and model.endpoint.port != 0:
                key = f"models[{i}].endpoint.port"
                if model.endpoint.port in ports:
                    taken_by = ports[model.endpoint.port]
                    mistakes.append(f"{key}: {model.endpoint.port} is taken by {taken_by}; give each its own")
                ports.setdefault(model.endpoint.port, key)
            if model.lending is not None and model.role == "master":
                mistakes.append(
                    f"models[{i}].lending: a master borrows, it does not lend; make it a worker or drop this"
                )
            if model.tensor_parallel_size > 1 and (model.lending is not None or model.role == "master"):
                key = "lending" if model.lending is not None else "role"
                mistakes.append(
                    f"models[{i}].{key}: with tensor_parallel_size {model.tensor_parallel_size} a model neither lends "
                    "nor borrows in this version; make it a worker without lending, or write tensor_parallel_size: 1"
                )
            if model.matryoshka_dimensions is not None and model.task != "embed":
                mistakes.append(f"models[{i}].matryoshka_dimensions: only a model with task: embed has embeddings")
            mistakes += [f"models[{i}].{mistake}" for mistake in self._mistakes_about_memory(model)]
            for tier, section in (("host", self.host_of(model)), ("storage", self.storage_of(model))):
                if section is not None:
                    why_not = why_not_below(tier, model.device, model.tensor_parallel_size, model.enable_prefix_caching)
                    mistakes += [f"models[{i}].tiers.{tier}: {why}" for why in why_not]
            if model.max_num_batched_tokens < model.max_num_seqs:
                mistakes.append(
                    f"models[{i}].max_num_batched_tokens: {model.max_num_batched_tokens} is less than max_num_seqs "
                    f"({model.max_num_seqs}), each of which needs a token per step; raise it or lower max_num_seqs"
                )
        mistakes += self._mistakes_about_events()
        mistakes += mistakes_about_tenants(self.node.tenants, self.node.api_key_env)
        written = [WrittenCompute(m.device, m.compute, "compute" in m.model_fields_set) for m in self.models]
        mistakes += mistakes_about_shares(written)
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    def _mistakes_about_events(self) -> Iterator[str]:
        taken: dict[str, str] = {}
        for i, model in enumerate(self.models):
            for name, endpoint in model.kv_events_config.endpoints.items():
                key = f"models[{i}].kv_events_config.{name}"
                if endpoint in taken:
                    yield f"{key}: {endpoint} is taken by {taken[endpoint]}; give each its own"
                taken.setdefault(endpoint, key)
                host = host_of(endpoint)
                if host is not None and not is_loopback(host) and not self.node.allow_unauthenticated:
                    yield (
                        f"{key}: {endpoint} can be reached from other machines, and shows whoever connects the tokens "
                        "of prompts and answers; write tcp://127.0.0.1:PORT or ipc:///PATH, or let everybody in with "
                        "node.allow_unauthenticated: true"
                    )

    def _mistakes_about_memory(self, model: ModelConfig) -> Iterator[str]:
        memory, on_gpu = model.kv_cache.memory, model.device != "cpu"
        interval, block_size = model.kv_cache.retention_interval, model.kv_cache.block_size
        if interval is not None and interval < block_size:
            yield (
                f"kv_cache.retention_interval: {interval} is less than block_size ({block_size}); a prefix is found "
                "again at the ends of blocks only"
            )
        if on_gpu and model.dtype == "float32":
            yield "dtype: float32 is not served on a GPU; write bfloat16 or float16"
        if isinstance(memory, PoolBytes):
            budget_bytes = model.lending.budget.bytes_of(memory.num_bytes) if model.lending else 0
            if budget_bytes > memory.num_bytes:
                yield (
                    f"lending.budget: {format_size(budget_bytes)} is more than kv_cache.memory ({memory}); lower it or "
                    "write 100%"
                )
            return
        key = f"kv_cache.memory: {memory}"
        if not on_gpu:
            yield (
                f"{key} is a part of a GPU, and this model runs on the CPU, whose memory other programs share; write a "
                "size such as 4GiB"
            )
        lenders = [other for other in self.models if other.role == "worker" and other.lending is not None]
        if self.node.lending.enabled and (model in lenders if model.role == "worker" else lenders):
            yield (
                f"{key} of a GPU is a number of bytes only once the model is loaded, and what {model.name} "
                f"{'borrows' if model.role == 'master' else 'lends'} is planned before; write a size such as 40GiB, "
                "or node.lending: off"
            )


def load_config(path: Path, **node_overrides: object) -> Config:
    """Read and check a YAML file; checkpoints are looked at later, by `swiftkv.planning`.

    A model's directory stands for a file that serves this model alone. `node_overrides` replace keys of the `node`
    section; None leaves what is written.
    Raises `ConfigError` whose message has one line per mistake.
    """
    raw = _one_model(path) if path.is_dir() else _read_yaml(path)
    given = {key: value for key, value in node_overrides.items() if value is not None}
    if given and isinstance(raw, dict):
        node = raw.get("node", {})
        raw["node"] = {**node, **given} if isinstance(node, dict) else node
    config = parse_config(raw)
    config._directory = path.resolve().parent
    check_backends({"node": config.node.tiers, **{f"models[{i}]": m.tiers for i, m in enumerate(config.models)}}, path)
    return config


def _one_model(directory: Path) -> dict[str, Any]:
    """Return what a file would hold that serves the model in `directory`, named like the directory."""
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{directory}: is a directory without a config.json; name a YAML file such as configs/embedded.yaml, or a "
            "model's directory in Hugging Face format"
        )
    name = re.sub(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+", "", directory.resolve().name)
    return {"models": [{"name": name[:_LONGEST_NAME] or "model", "path": str(directory.resolve())}]}


def read_model(path: Path) -> object:
    """Return one model's section of a file, from a file that holds nothing else or for a model's directory.

    A relative `path` of the section becomes absolute if it leads somewhere from the file: whoever reads the section
    may be elsewhere. Raises `ConfigError` for what cannot be read.
    """
    if path.is_dir():
        return _one_model(path)["models"][0]
    section = _read_yaml(path)
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: holds {show(section)}; it wants a mapping with the keys of a model")
    directory = section.get("path")
    if isinstance(directory, str) and (path.resolve().parent / directory).is_dir():
        return {**section, "path": str(path.resolve().parent / directory)}
    return section


def _read_yaml(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}; name a YAML file such as configs/embedded.yaml") from None
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}:{_yaml_mistake(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None


def parse_config(raw: object) -> Config:
    """Check what a YAML file holds. Raises `ConfigError` whose message has one line per mistake."""
    if not isinstance(raw, dict):
        raise ConfigError(f"the file holds {show(raw)}; it wants a mapping with the keys node and models")
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(describe_mistakes(error, Config)) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a word", problem_mark=key.start_mark)
            if key.value in seen:
                problem = f"the key {key.value!r} is written twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml_mistake(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    where = f"{mark.line + 1}:{mark.column + 1}: " if mark else " "
    return f"{where}{error.problem or 'not YAML'}"
