"""The YAML file as frozen, validated types. Each mistake is one line that names its key and what to write there.

The sections are in `node_config.py` and `model_config.py`. This file has the rules that span them, and reads files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, PrivateAttr, ValidationError, model_validator

from swiftkv.config_fields import Section
from swiftkv.errors import ConfigError
from swiftkv.kv_events_config import host_of
from swiftkv.mistakes import describe_mistakes, mistakes_about_text, show
from swiftkv.model_config import LONGEST_NAME, ModelConfig
from swiftkv.node_config import NodeConfig, is_loopback
from swiftkv.tenant_config import mistakes_about_tenants
from swiftkv.tier_config import HostConfig, StorageConfig, check_backends
from swiftkv.units import DeviceShare, PoolBytes, format_size

_MAX_FILE_BYTES = 4 << 20
_TAGS_OF_WORDS = {"tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"}


class Config(Section):
    """The whole file."""

    node: NodeConfig = Field(default_factory=NodeConfig, description="a mapping")
    models: Annotated[tuple[ModelConfig, ...], Field(strict=False)] = Field(description="a list of at least one model")
    _directory: Path = PrivateAttr(Path("/"))  # until it is known; the working directory may be gone

    @property
    def directory(self) -> Path:
        """The directory of the file, where relative paths in it start."""
        return self._directory

    def storage_of(self, model: ModelConfig) -> StorageConfig | None:
        """Return the storage tier of a model: its own, or the node's."""
        return (model.tiers or self.node.tiers).storage

    def host_of(self, model: ModelConfig) -> HostConfig | None:
        """Return the host memory of a model: its own, or the node's."""
        return (model.tiers or self.node.tiers).host

    def with_model(self, section: object) -> Config:
        """Return this configuration with one more model, checked like those of a file.

        Raises `ConfigError` with one line per mistake; keys are those of the section.
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

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, raw: Any) -> Any:
        if mistakes := list(mistakes_about_text(raw)):
            raise ValueError("\n".join(mistakes))
        return raw

    @model_validator(mode="after")
    def _check_across_models(self) -> Config:
        mistakes = [] if self.models else ["models: [] is not a list of at least one model"]
        if self.node.max_bodies < self.node.max_body:
            mistakes.append(
                f"node.max_bodies: {format_size(self.node.max_bodies)} is less than node.max_body "
                f"({format_size(self.node.max_body)}), so that the largest body never fits; raise it or lower max_body"
            )
        key_of_name: dict[str, str] = {}
        key_of_port = {str(self.node.port): "node.port"}
        for i, model in enumerate(self.models):
            key = f"models[{i}]"
            for name in model.names:
                name_key = "name" if name == model.name else "served_model_name"
                mistakes += _take(f"'{name}'", f"{key}.{name_key}", key_of_name)
            if model.endpoint is not None and model.endpoint.port != 0:
                mistakes += _take(str(model.endpoint.port), f"{key}.endpoint.port", key_of_port)
            mistakes += [f"{key}.{mistake}" for mistake in self._mistakes_about_model(model)]
        mistakes += self._mistakes_about_events()
        mistakes += mistakes_about_tenants(self.node.tenants, self.node.api_key_env)
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    def _mistakes_about_model(self, model: ModelConfig) -> Iterator[str]:
        """Yield a line for each rule that a model breaks by itself or beside the node's keys, from its own key on."""
        if model.lending is not None and model.role == "master":
            yield "lending: a master borrows, it does not lend; make it a worker or drop this"
        yield from self._mistakes_about_ranks(model)
        if model.matryoshka_dimensions is not None and model.task != "embed":
            yield (
                "matryoshka_dimensions: only a model with task: embed has embeddings; write task: embed, or drop this"
            )
        if model.device != "cpu" and model.tensor_parallel_size > 1 and model.share is not None:
            yield (
                f"compute: a model on several GPUs (tensor_parallel_size {model.tensor_parallel_size}) takes no turns "
                "on them in this version; drop this, or write tensor_parallel_size: 1"
            )
        yield from self._mistakes_about_memory(model)
        yield from (f"tiers.{mistake}" for mistake in self._mistakes_about_tiers(model))
        yield from (f"speculative_config.{mistake}" for mistake in model.why_no_drafts())
        if model.max_num_batched_tokens < model.max_num_seqs:
            yield (
                f"max_num_batched_tokens: {model.max_num_batched_tokens} is less than max_num_seqs "
                f"({model.max_num_seqs}), each of which needs a token per step; raise it or lower max_num_seqs"
            )

    def _mistakes_about_events(self) -> Iterator[str]:
        taken: dict[str, str] = {}
        for i, model in enumerate(self.models):
            for name, endpoint in model.kv_events_config.endpoints.items():
                key = f"models[{i}].kv_events_config.{name}"
                yield from _take(endpoint, key, taken)
                host = host_of(endpoint)
                if host is not None and not is_loopback(host) and not self.node.allow_unauthenticated:
                    yield (
                        f"{key}: {endpoint} can be reached from other machines, which could then read the tokens "
                        "of prompts and answers; write tcp://127.0.0.1:PORT or ipc:///PATH, or let everybody in with "
                        "node.allow_unauthenticated: true"
                    )

    def _mistakes_about_tiers(self, model: ModelConfig) -> Iterator[str]:
        host, memory = self.host_of(model), model.kv_cache.memory
        if host is not None:
            yield from (f"host: {why}" for why in model.why_not_below("host"))
        if self.storage_of(model) is not None:
            yield from (f"storage: {why}" for why in model.why_not_below("storage"))
        if host is not None and host.ratio is not None and isinstance(memory, DeviceShare):
            yield (
                f"host.ratio: {memory} of a GPU is known in bytes only when the model is loaded, and host memory is "
                "made before that; write a size instead, such as 64GiB, or kv_cache.memory as a size"
            )

    def _mistakes_about_ranks(self, model: ModelConfig) -> Iterator[str]:
        size = model.tensor_parallel_size
        if size == 1 or (model.lending is None and model.role == "worker"):
            return
        key = "role" if model.lending is None else "lending"
        if model.device != "cpu":
            yield (
                f"{key}: with tensor_parallel_size {size} a model on GPUs neither lends nor borrows in this version; "
                "make it a worker without lending, or write tensor_parallel_size: 1"
            )
        elif self.node.lending.transport == "p2p":
            yield (
                f"{key}: with tensor_parallel_size {size} a model lends and borrows in memory that its neighbours map, "
                "and node.lending.transport is p2p; write auto there, or tensor_parallel_size: 1"
            )
        if model.lending is None:
            return
        for other in self.models:
            if other.role == "master" and other.device == model.device and other.tensor_parallel_size % size:
                yield (
                    f"lending: a model with tensor_parallel_size {size} lends to masters with {size} ranks or a "
                    f"multiple of that, and {other.name} has {other.tensor_parallel_size}; drop this, or change one of "
                    "the two"
                )

    def _mistakes_about_memory(self, model: ModelConfig) -> Iterator[str]:
        memory, on_gpu = model.kv_cache.memory, model.device != "cpu"
        interval, block_size = model.kv_cache.retention_interval, model.kv_cache.block_size
        if interval is not None and interval < block_size:
            yield (
                f"kv_cache.retention_interval: {interval} is less than block_size ({block_size}), and a prefix is "
                f"found again only where a block ends; write at least {block_size}, or null"
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
                f"{key} of a GPU is known in bytes only when the model is loaded, and what {model.name} "
                f"{'borrows' if model.role == 'master' else 'lends'} is planned before that; write a size such as "
                "40GiB, or node.lending: off"
            )


def _take(value: str, key: str, taken: dict[str, str]) -> list[str]:
    """Note in `taken` that `value` is at `key`, or return a line about the key that it is at already."""
    if value in taken:
        return [f"{key}: {value} is taken by {taken[value]}; give each its own"]
    taken[value] = key
    return []


def load_config(path: Path, **node_overrides: object) -> Config:
    """Read and check a YAML file; checkpoints are looked at later, by `swiftkv.planning`.

    A model's directory stands for a file that serves this model alone. `node_overrides` replace keys of the `node`
    section; None keeps the file's value.
    Raises `ConfigError` with one line per mistake.
    """
    raw = _one_model(path) if os.path.isdir(path) else _read_yaml(path)
    given = {key: value for key, value in node_overrides.items() if value is not None}
    if given and isinstance(raw, dict):
        node = raw.get("node", {})
        raw["node"] = {**node, **given} if isinstance(node, dict) else node
    config = parse_config(raw)
    config._directory = path.resolve().parent
    check_backends({"node": config.node.tiers, **{f"models[{i}]": m.tiers for i, m in enumerate(config.models)}}, path)
    return config


def _one_model(directory: Path) -> dict[str, Any]:
    """Return the content of a file that serves the model in `directory`, named like the directory."""
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"{directory}: is a directory without a config.json; name a YAML file such as configs/embedded.yaml, or a "
            "model's directory in Hugging Face format"
        )
    name = re.sub(r"[^A-Za-z0-9._-]+|^[^A-Za-z0-9]+", "", directory.resolve().name)
    return {"models": [{"name": name[:LONGEST_NAME] or "model", "path": str(directory.resolve())}]}


def read_model(path: Path) -> object:
    """Return one model's section: the content of a YAML file, or for a model's directory, a section that serves it.

    If the section's `path`, relative to the file, leads to a directory, it becomes absolute, because the process that
    reads the section may run elsewhere. Raises `ConfigError` for a file that cannot be read.
    """
    if os.path.isdir(path):
        return _one_model(path)["models"][0]
    section = _read_yaml(path)
    if not isinstance(section, dict):
        raise ConfigError(f"{path}: holds {show(section)}; write a mapping with the keys of a model")
    directory = section.get("path")
    if isinstance(directory, str) and os.path.isdir(path.resolve().parent / directory):
        return {**section, "path": str(path.resolve().parent / directory)}
    return section


def _read_yaml(path: Path) -> object:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{path}: cannot be read: {reason}; name a YAML file such as configs/embedded.yaml") from None
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: has more than {format_size(_MAX_FILE_BYTES)}, and so is no file that names models")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{path}:{_yaml_mistake(error)}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{path}: lists and mappings are nested too deeply; write the keys node and models") from None


def parse_config(raw: object) -> Config:
    """Check the content of a YAML file. Raises `ConfigError` with one line per mistake."""
    if not isinstance(raw, dict):
        raise ConfigError(f"the file holds {show(raw)}; write a mapping with the keys node and models")
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(describe_mistakes(error, Config)) from None


class _Loader(yaml.SafeLoader):
    """Refuses a key that is written twice, of which PyYAML keeps the last, and text that is no value of its type."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):  # such as a 30th of February
            problem = f"{show(node.value)} cannot be read as a value of its type"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark) from None

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.MarkedYAMLError(problem="this is not a mapping", problem_mark=node.start_mark)
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag not in _TAGS_OF_WORDS:
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
