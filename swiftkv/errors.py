"""Every exception that swiftkv raises for something a user can mend."""

from __future__ import annotations

from collections.abc import Iterable


class SwiftkvError(Exception):
    """Base of all of swiftkv's own exceptions."""


class ConfigError(SwiftkvError, ValueError):
    """A mistake in a configuration: the message names the key and says what would be right."""


class NoRoomError(ConfigError):
    """A device without enough free memory: too much was asked for, or another process still holds it."""


class CheckpointError(SwiftkvError, ValueError):
    """A model directory that cannot be served: the message names the file and what is wrong with it."""


class FilesChangedError(CheckpointError):
    """A model whose files were overwritten while they were in use: another process would load the new ones."""


class LoadError(SwiftkvError):
    """A model that was asleep and cannot be loaded again; `cause` is what its loading raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class EngineError(SwiftkvError):
    """An engine process failed to start or died."""


class TransferError(SwiftkvError):
    """A copy between two pools, or from host memory, failed.

    The peer is gone, refused, or was asked for bytes that it does not have.

    `links` are the links of the failed job that are to blame; empty if they are not known, or if no job failed.
    """

    def __init__(self, message: str, links: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.links = tuple(links)
