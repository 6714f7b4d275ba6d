"""The options of storage backends, in the YAML file or in a file that it names."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError

from swiftkv.config_fields import DURATION, SIZE, VARIABLE, Duration, Section, Size, Variable
from swiftkv.errors import ConfigError
from swiftkv.mistakes import describe_mistakes, show
from swiftkv.units import parse_size

_SHARE = "a share of calls from 0.0 to 1.0"
_MODULE = "a module's full name such as my_package.my_backend"
_CLASS = "the name of a class in that module"

_PARSERS: Mapping[str, Callable[[str], object]] = {
    ".json": json.loads,
    ".toml": tomllib.loads,
    ".yaml": yaml.safe_load,
    ".yml": yaml.safe_load,
}

_Time = Annotated[Duration, Field(gt=0)]
_Share = Annotated[float, Field(ge=0.0, le=1.0, strict=False)]
_MaxCalls = Annotated[int, Field(ge=1, le=64)]
_Module = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
_Class = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]


class _Options(Section):
    backend: ClassVar[str]
    _directory: Path = PrivateAttr(Path("/"))  # until `parse_storage` says where relative paths start


class FileOptions(_Options):
    """A directory of this machine with an object for each block."""

    backend: ClassVar[str] = "file"

    path: str = Field(min_length=1, description="a directory; it is made if it is not there")
    size: Size = Field(description=SIZE)
    min_free: Annotated[int, BeforeValidator(parse_size), Field(ge=0)] = Field(1 << 30, description=SIZE)
    fsync: Literal["none", "batch"] = Field("none", description="none or batch")
    max_calls: _MaxCalls = Field(8, description="an integer from 1 to 64")

    @property
    def directory(self) -> Path:
        """The directory; a relative path starts where the YAML file lies."""
        return self._directory / os.path.expanduser(self.path)


class RedisOptions(_Options):
    """A Redis server."""

    backend: ClassVar[str] = "redis"

    url: str = Field(
        pattern=r"^(redis|rediss|unix)://", description="redis://HOST:PORT/DB, rediss://HOST:PORT/DB or unix:///SOCKET"
    )
    password_env: Variable | None = Field(None, description=VARIABLE)
    prefix: str = Field("swiftkv:", max_length=64, description="a text of at most 64 characters")
    ttl: _Time = Field(86_400.0, description=DURATION)
    timeout: _Time = Field(1.0, description=DURATION)
    max_calls: _MaxCalls = Field(4, description="an integer from 1 to 64")

    def password(self) -> str | None:
        """Return the server's password, from the environment. Raises `ConfigError` if it is named but not set."""
        if self.password_env is None:
            return None
        password = os.environ.get(self.password_env)
        if not password:
            raise ConfigError(
                f"password_env: the environment variable {self.password_env} is not set; export it, or write null"
            )
        return password


class MooncakeOptions(_Options):
    """A Mooncake Store, by the names that Mooncake has for its settings."""

    backend: ClassVar[str] = "mooncake"

    master_server_address: str = Field(
        pattern=r"^([\w.-]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}$|^(etcd|redis|k8s)://",
        description="HOST:PORT of a mooncake_master, or etcd://, redis:// or k8s:// where several elect one",
    )
    metadata_server: str = Field(
        "P2PHANDSHAKE", min_length=1, description="P2PHANDSHAKE, or the address of a metadata server"
    )
    local_hostname: str = Field(
        "127.0.0.1", min_length=1, description="the name or address of this machine, as the others reach it"
    )
    protocol: Literal["tcp", "rdma"] = Field("tcp", description="tcp or rdma")
    device_name: str = Field("", description="the RDMA devices, with commas between them; empty: all")
    global_segment_size: Annotated[int, BeforeValidator(parse_size), Field(ge=0)] = Field(0, description=SIZE)
    prefix: str = Field("swiftkv:", max_length=64, description="a text of at most 64 characters")
    timeout: _Time = Field(1.0, description=DURATION)
    max_calls: _MaxCalls = Field(4, description="an integer from 1 to 64")


class DynamicOptions(_Options):
    """A user's class that keeps bytes: `swiftkv.storage.backend.Medium`."""

    backend: ClassVar[str] = "dynamic"

    module_path: _Module = Field(description=_MODULE)
    class_name: _Class = Field(description=_CLASS)
    options: dict[str, Any] = Field(default_factory=dict, description="a mapping: the keyword arguments of the class")


class SglangOptions(_Options):
    """A class written for SGLang's `HiCacheStorage`."""

    backend: ClassVar[str] = "dynamic_sglang"

    module_path: _Module = Field(description=_MODULE)
    class_name: _Class = Field(description=_CLASS)
    model_name: str = Field("swiftkv", min_length=1, description="the model's name as the backend sees it")
    extra_config: dict[str, Any] = Field(default_factory=dict, description="a mapping for the backend")
    is_shared: bool = Field(False, description="true or false")


class FaultOptions(_Options):
    """Another backend whose medium fails now and then."""

    backend: ClassVar[str] = "fault"

    inner: dict[str, Any] = Field(description="a mapping: the options of another backend")
    seed: int = Field(0, description="an integer")
    fail: _Share = Field(0.0, description=_SHARE)
    delay: _Share = Field(0.0, description=_SHARE)
    delay_time: _Time = Field(0.1, description=DURATION)
    flip: _Share = Field(0.0, description=_SHARE)
    truncate: _Share = Field(0.0, description=_SHARE)
    hang: _Share = Field(0.0, description=_SHARE)
    hang_time: _Time = Field(60.0, description=DURATION)
    bandwidth: Size | None = Field(None, description=f"the bytes that it moves in a second: {SIZE}")


StorageOptions = FileOptions | RedisOptions | MooncakeOptions | DynamicOptions | SglangOptions | FaultOptions

_BACKENDS: Mapping[str, type[StorageOptions]] = {
    options.backend: options
    for options in (FileOptions, RedisOptions, MooncakeOptions, DynamicOptions, SglangOptions, FaultOptions)
}


def parse_storage(raw: object, key: str, directory: Path) -> StorageOptions:
    """Check a backend's options, inline or from the file that `config` names; inline options win.

    Args:
        key: Where they stand in the YAML file, for messages.
        directory: Where relative paths start.

    Raises:
        ConfigError: One line for each mistake, with its key.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{key}: {show(raw)} is not a mapping with the key backend ({', '.join(_BACKENDS)})")
    given = dict(raw)
    if "config" in given:
        given = read_options(given.pop("config"), f"{key}.config", directory) | given
    name = given.pop("backend", "file")
    if not isinstance(name, str) or name not in _BACKENDS:
        raise ConfigError(f"{key}.backend: {show(name)} is not one of {', '.join(_BACKENDS)}")
    model = _BACKENDS[name]
    try:
        options = model.model_validate(given)
    except ValidationError as error:
        lines = describe_mistakes(error, model).splitlines()
        raise ConfigError("\n".join(f"{key}.{line}" for line in lines)) from None
    options._directory = directory
    if isinstance(options, FaultOptions):
        inner_options(options, key)  # reports mistakes in these at the start, too
    return options


def inner_options(options: FaultOptions, key: str = "storage") -> StorageOptions:
    """Return the options of the backend that faults are put into. Raises `ConfigError`."""
    return parse_storage(options.inner, f"{key}.inner", options._directory)


def read_options(path: object, key: str, directory: Path) -> dict[str, Any]:
    """Return the mapping in a JSON, TOML or YAML file. Raises `ConfigError`."""
    wanted = "the path of a .json, .toml, .yaml or .yml file"
    if not isinstance(path, str):
        raise ConfigError(f"{key}: {show(path)} is not {wanted}")
    file = directory / os.path.expanduser(path)
    parse = _PARSERS.get(file.suffix)
    if parse is None:
        raise ConfigError(f"{key}: {path} is not {wanted}")
    try:
        options = parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{key}: {path} cannot be read: {error.strerror}; write {wanted}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{key}: {path} is not {file.suffix[1:].upper()}: {' '.join(str(error).split())}") from None
    if not isinstance(options, dict):
        raise ConfigError(f"{key}: {path} holds {show(options)}; write a mapping of options")
    return options
