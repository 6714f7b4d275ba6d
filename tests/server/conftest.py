from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from echo_gateway import Gateway, start_gateway, train_tokenizer

from swiftkv.server.app import ServerSettings
from swiftkv.server.tokenizer import Tokenizer
from swiftkv.server.tool_parsers.hermes import HermesParser


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(tokenizer_dir)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    """Steps take no time."""
    gateway, stop = start_gateway(tmp_path_factory.mktemp("fast"), tokenizer)
    yield gateway
    stop()


@pytest.fixture(scope="session")
def tool_gateway(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[Gateway]:
    """Its models take tools, and call one where the prompt has a call."""
    gateway, stop = start_gateway(tmp_path_factory.mktemp("tools"), tokenizer, tool_parser=HermesParser)
    yield gateway
    stop()


@pytest.fixture
def slow_gateway(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Gateway]:
    """A gateway of its own for a test that breaks things; a step takes 10 ms."""
    gateway, stop = start_gateway(tmp_path, tokenizer, step_ms=10)
    yield gateway
    stop()


@pytest.fixture
def keyed_gateway(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Gateway]:
    """A gateway of its own that asks for keys."""
    settings = ServerSettings(admin_key="admin-key", api_key="api-key")
    gateway, stop = start_gateway(tmp_path, tokenizer, settings=settings)
    yield gateway
    stop()
