"""The weights of an engine: watched while it serves, given up when it sleeps, loaded again beside its step loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from swiftkv.background import Background
from swiftkv.engine.runner import ModelRunner
from swiftkv.errors import CheckpointError, ConfigError, LoadError
from swiftkv.models.decoder import Decoder

_LOOK_EVERY_S = 0.1


class EngineWeights:
    """Watches the weights of a runner, gives them up and brings them back; for the engine's thread.

    While they are loaded, the step loop goes on with lending.
    """

    def __init__(self, runner: ModelRunner, wake_engine: Callable[[], None]) -> None:
        """`wake_engine` is called in another thread when weights have been loaded, or could not be."""
        self._runner = runner
        self._wake_engine = wake_engine
        self._loaded: Future[Decoder] | None = None
        self._look_again_s = 0.0  # monotonic: when to look at the files again; infinite while they are not used

    def check(self, now_s: float) -> None:
        """Check that no file has changed since it was loaded, at most every `_LOOK_EVERY_S`.

        On the CPU, embeddings and norms are views of the mapped files, so writing to a file would change the model.

        Raises `FilesChangedError` if a file was written to.
        """
        if now_s >= self._look_again_s:
            self._runner.check_files()
            self._look_again_s = now_s + _LOOK_EVERY_S

    def give_up(self) -> None:
        self._look_again_s = math.inf
        self._runner.drop_weights()

    def load(self, give_way_s: float) -> None:
        """Begin to load the weights; the load gives way to other work for `give_way_s` at most."""
        assert self._loaded is None
        thread = ThreadPoolExecutor(1, "load weights", initializer=torch.set_num_threads, initargs=(1,))
        self._loaded = thread.submit(self._load, give_way_s)
        self._loaded.add_done_callback(lambda _: self._wake_engine())
        thread.shutdown(wait=False)

    def _load(self, give_way_s: float) -> Decoder:
        background = Background(give_way_s)
        try:
            return self._runner.load_weights(background)
        finally:
            background.end()

    def take(self) -> bool:
        """Have the runner use weights that were loaded since the last call; return whether there were any.

        Raises `LoadError` if they could not be loaded.
        """
        if self._loaded is None or not self._loaded.done():
            return False
        loaded, self._loaded = self._loaded, None
        try:
            self._runner.use(loaded.result())
        except (CheckpointError, ConfigError, OSError) as error:
            raise LoadError(error) from error
        self._look_again_s = 0.0
        return True
