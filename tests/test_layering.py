"""Data flows downwards: a room imports only from rooms below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import swiftkv

PACKAGE = Path(swiftkv.__file__).parent

LAYERS = [
    {"demo_serve"},
    {"__main__"},
    {"cli"},
    {"demo"},
    {"cli_watch"},
    {"simulate", "lending_command", "models_command", "storage_command", "cache_command", "chat_command"},
    {"node", "bench", "checkpoint", "demo_node", "doctor", "lending_tables", "top"},
    {"admin_client"},
    {"model_changes"},
    {"handles", "ports"},
    {"fleet"},
    {"host_tiers"},
    {"supervisor", "engine_configs", "devices", "sockets", "admin_key", "state", "stopping", "learnt"},
    {"watch", "restarts"},
    {"server"},
    {"engine"},
    {"lending_party"},
    {"master", "worker", "tier"},
    {"lease", "planning"},
    {"models"},
    {"cache", "transport", "storage"},
    {"kernels"},
    {"_core", "_lease", "_cpu", "_transport", "_host", "_files"},
    {"config", "hub"},
    {"node_config", "model_config"},
    {"tenant_config", "tier_config", "kv_events_config", "compute_config", "speculative_config"},
    {"storage_options"},
    {"config_fields", "mistakes"},
    {"machine_memory"},
    {
        "arithmetic",
        "background",
        "errors",
        "grammars",
        "histogram",
        "latency",
        "locks",
        "output",
        "policies",
        "processes",
        "progress",
        "shares",
        "tables",
        "tasks",
        "units",
        "wakeup",
        "__init__",
    },
    {"shared_memory", "system_files"},
]
ONLY_THESE_MODULES = {
    ("server", "engine"): {"engine.messages"},
    ("simulate", "engine"): {"engine.messages"},
    ("node", "engine"): {"engine.messages"},
    ("fleet", "engine"): {"engine.messages"},
    ("host_tiers", "engine"): {"engine.messages"},
    ("supervisor", "engine"): {"engine.messages"},
    ("engine_configs", "engine"): {"engine.messages"},
    ("learnt", "engine"): {"engine.messages"},
    ("engine_configs", "lease"): {"lease.messages"},
    ("supervisor", "lease"): {"lease.messages"},
    ("engine_configs", "tier"): {"tier.messages"},
    ("supervisor", "tier"): {"tier.messages"},
    ("server", "lease"): {"lease.messages"},
    ("server", "tier"): {"tier.messages"},
}

LAYER_OF = {room: depth for depth, rooms in enumerate(LAYERS) for room in rooms}


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Yield the modules of swiftkv, without that prefix, that `source`, a module of `package`, imports anywhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("swiftkv.") for name in names if name.startswith("swiftkv."))


def violations(module: str, source: str) -> list[str]:
    """Return the imports of `module` (as `server.app`, without `swiftkv.`) that are forbidden."""
    room = module.split(".")[0]
    package = ".".join(["swiftkv", *module.split(".")[:-1]])
    found = []
    for imported in imported_modules(source, package):
        target = imported.split(".")[0]
        if target == room or target.startswith("__"):
            continue
        if target not in LAYER_OF:
            found.append(f"{module} imports {imported}: say in LAYERS where {target} belongs")
        elif LAYER_OF[target] <= LAYER_OF[room]:
            found.append(f"{module} imports {imported}, which is not below it")
        elif (allowed := ONLY_THESE_MODULES.get((room, target))) and not any(
            imported == name or imported.startswith(f"{name}.") for name in allowed
        ):
            found.append(f"{module} imports {imported}; of {target} it may know only {', '.join(allowed)}")
    return found


def modules() -> dict[str, Path]:
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").resolve().rglob("*.py")]
    kernels = (PACKAGE / "kernels").resolve()
    named = {}
    for file in files:
        is_kernel = file.resolve().is_relative_to(kernels)
        relative = Path("kernels") / file.resolve().relative_to(kernels) if is_kernel else file.relative_to(PACKAGE)
        named[".".join(relative.with_suffix("").parts)] = file
    return named


def test_every_room_imports_downwards() -> None:
    found = modules()
    assert {"config", "cli", "cache.pool"} <= set(found)
    unknown = {name for name in found if name.split(".")[0] not in LAYER_OF}
    assert not unknown, f"say in LAYERS where these belong: {unknown}"
    mistakes = [line for name, file in found.items() for line in violations(name, file.read_text(encoding="utf-8"))]
    assert not mistakes, "\n".join(mistakes)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.engine", "from swiftkv.server.app import create_app"),
        ("engine.engine", "def f():\n    import swiftkv.node"),
        ("engine.engine", "from ..server import app"),
        ("server.app", "from swiftkv.engine.runner import Runner"),
        ("server.app", "from swiftkv.engine import runner"),
        ("node", "from swiftkv.engine.engine import Engine"),
        ("master.stream", "from swiftkv.worker.elastic import ElasticCache"),
        ("worker.elastic", "from swiftkv import master"),
        ("config", "from swiftkv.cache.geometry import KVGroup"),
        ("kernels.cpu", "from swiftkv.models.dense import DenseDecoder"),
        ("cache.pool", "from swiftkv.models.config import DecoderConfig"),
        ("cache.pool", "from swiftkv.attic import something"),
    ],
)
def test_an_import_that_does_not_go_down_is_found(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("server.client", "from swiftkv.engine.messages import Ready"),
        ("server.client", "from swiftkv.engine import messages"),
        ("server.app", "from .client import EngineClient\nfrom swiftkv import __version__"),
        ("engine.engine", "from swiftkv import _core\nfrom swiftkv.cache.pool import Pool"),
        ("models.config", "from swiftkv.cache.geometry import KVGroup\nfrom swiftkv.errors import ConfigError"),
    ],
)
def test_an_import_that_goes_down_passes(module: str, source: str) -> None:
    assert not violations(module, source)


def test_modules_of_tests_have_names_of_their_own() -> None:
    """Modules beside tests are imported without a package: of two with one name, both directories get the first."""
    tests = Path(__file__).parent
    found = [path for path in tests.rglob("*.py") if path.name not in ("conftest.py", "__init__.py")]
    names = [path.name for path in found]
    assert [str(path.relative_to(tests)) for path in found if names.count(path.name) > 1] == []
