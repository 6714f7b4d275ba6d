"""Media that are users' own classes, from modules that the options name."""

from __future__ import annotations

import importlib
from typing import Any

from swiftkv.errors import ConfigError
from swiftkv.storage.backend import Medium
from swiftkv.storage_options import DynamicOptions

_METHODS = ("exists", "read", "write", "drop", "usage", "close")


def open_dynamic(options: DynamicOptions) -> Medium:
    """Make an object of the class, whose keyword arguments are the options. Raises `ConfigError`.

    If its constructor raises `ValueError` or `OSError`, the class cannot be used with these options.
    """
    medium_class = load_class(options.module_path, options.class_name)
    if lacking := [method for method in _METHODS if not callable(getattr(medium_class, method, None))]:
        raise ConfigError(
            f"class_name: {options.class_name} has no method {lacking[0]}; it needs every method of "
            "swiftkv.storage.backend.Medium"
        )
    try:
        medium: Medium = medium_class(**options.options)
    except TypeError as error:
        raise ConfigError(f"options: {options.class_name} does not take these: {error}") from None
    except (ValueError, OSError) as error:
        raise ConfigError(f"options: {options.class_name} cannot be opened: {error}") from None
    return medium


def load_class(module_path: str, class_name: str) -> Any:
    """Import a module, and return a class of it. Raises `ConfigError`."""
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise ConfigError(
            f"module_path: {module_path} cannot be imported: {error}; install it in the environment of swiftkv, or add "
            "its directory to PYTHONPATH"
        ) from None
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ConfigError(f"class_name: {module_path} has no class {class_name}")
    return found
