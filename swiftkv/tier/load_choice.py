"""The choice of the blocks of a prompt that storage should load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swiftkv._core import Scheduler
from swiftkv.arithmetic import ceil_div
from swiftkv.cache.geometry import KVGroup
from swiftkv.tier.messages import TierSpec
from swiftkv.tier.rates import LoadPlanner, num_not_loaded


@dataclass(frozen=True, slots=True)
class WaitingPrompt:
    """A prompt of which storage may have more blocks than the pool."""

    request_id: int
    num_keys: int  # its full blocks
    num_usable: int  # blocks that it could use on arrival


@dataclass(frozen=True, slots=True)
class Stretch:
    """The blocks of a prompt that storage should load: from `begin` to `end`, without those that are in the pool."""

    begin: int
    end: int

    @property
    def is_back(self) -> bool:
        """Whether the request computes the blocks before the stretch meanwhile. Otherwise it waits for the load."""
        return self.begin > 0


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The stretch to load, if any, and whether computing the whole is expected to be as fast as loading it.

    In that case a load is only a trial, which measures storage again.
    """

    stretch: Stretch | None
    is_declined: bool = False


class LoadChooser:
    """Chooses what to load by the speeds of storage, which `planner` knows, and of computing."""

    def __init__(
        self,
        spec: TierSpec,
        scheduler: Scheduler,
        planner: LoadPlanner,
        *,
        groups: Sequence[KVGroup],
        num_ranks: int,
    ) -> None:
        self._spec = spec
        self._scheduler = scheduler
        self._planner = planner
        self._groups = groups
        self._num_ranks = num_ranks
        self._block_size = groups[0].block_size

    def choose(
        self,
        prompt: WaitingPrompt,
        is_stored: npt.NDArray[np.uint8],
        pinned: npt.NDArray[np.int32] | None = None,
        *,
        reading_bytes: int,
        may_compute: bool,
        now_s: float,
    ) -> LoadChoice:
        """Return which blocks of a prompt storage should read.

        `wait_complete` reads all that storage has, without asking the planner. Blocks that are pinned in host memory
        cost storage no time, so they are always worth it, if there are enough of them.

        Args:
            prompt: The prompt.
            is_stored: Whether storage has each block, [num_keys * groups].
            pinned: The chunks of blocks that are pinned in host memory, -1 for others, [num_keys * groups]; `None` if
                there are none.
            reading_bytes: The bytes that storage reads first, for other prompts.
            may_compute: Whether part of the prompt may be computed meanwhile, because that delays no other request.
            now_s: The time, on the monotonic clock.
        """
        length = self._scheduler.loadable(prompt.request_id, is_stored, prompt.num_keys, pinned)
        if not self._is_enough(length - prompt.num_usable):
            return LoadChoice(None)
        if self._spec.prefetch_policy == "wait_complete":
            return LoadChoice(Stretch(0, length))
        copies = _Copies(self._groups, is_stored, pinned, self._num_ranks)
        if not copies.num_bytes(prompt.num_usable, length):
            return LoadChoice(Stretch(0, length))
        attended = self._num_attended(prompt, pinned, length)
        if attended == prompt.num_usable and may_compute:
            first = self._first_of_back(prompt, length, copies, reading_bytes)
            if first is not None:
                return LoadChoice(Stretch(first, length))
        num_bytes = copies.num_bytes(attended, length)
        compute_s = self._compute_s(prompt, attended - prompt.num_usable, length - prompt.num_usable)
        if self._planner.is_worth_loading(num_bytes, reading_bytes, compute_s):
            return LoadChoice(Stretch(0, length))
        if not self._planner.begins_trial(now_s):
            is_enough = self._is_enough(attended - prompt.num_usable)
            return LoadChoice(Stretch(0, attended) if is_enough else None, is_declined=True)
        shorter = min(length, attended + ceil_div(self._spec.prefetch_threshold, self._block_size))
        usable = self._scheduler.loadable(prompt.request_id, is_stored, shorter, pinned)
        return LoadChoice(Stretch(0, usable if usable > attended else length), is_declined=True)

    def _is_enough(self, num_blocks: int) -> bool:
        return num_blocks * self._block_size >= self._spec.prefetch_threshold

    def _num_attended(self, prompt: WaitingPrompt, pinned: npt.NDArray[np.int32] | None, length: int) -> int:
        """Return how many leading blocks the prompt could use without any copy, at least those usable on arrival."""
        if pinned is None:
            return prompt.num_usable
        is_pinned = (pinned >= 0).astype(np.uint8)
        return max(prompt.num_usable, self._scheduler.loadable(prompt.request_id, is_pinned, length, pinned))

    def _first_of_back(self, prompt: WaitingPrompt, length: int, copies: _Copies, reading_bytes: int) -> int | None:
        """Return the first block to load if the blocks before it should be computed at the same time.

        Return `None` if it is as good to load all blocks, or to compute all of them.
        """
        if not self._scheduler.can_meet:
            return None
        num_blocks = length - prompt.num_usable
        num_computed = self._planner.num_to_compute(
            num_blocks,
            lambda count: copies.num_bytes(prompt.num_usable + count, length),
            reading_bytes,
            lambda count: self._compute_s(prompt, 0, count),
        )
        if num_computed is None or not self._is_enough(num_blocks - num_computed):
            return None
        return prompt.num_usable + num_not_loaded(
            num_computed, lambda begin, end: self._compute_s(prompt, begin, end) or 0.0
        )

    def _compute_s(self, prompt: WaitingPrompt, begin: int, end: int) -> float | None:
        """Return the seconds to compute blocks `begin` to `end`, counted from the first that was not usable on arrival.

        `None` if step times are not known yet.
        """
        return self._scheduler.prefill_s(
            (prompt.num_usable + begin) * self._block_size, (prompt.num_usable + end) * self._block_size
        )


class _Copies:
    """The blocks of a prompt that storage would copy to the pool."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        is_stored: npt.NDArray[np.uint8],
        pinned: npt.NDArray[np.int32] | None,
        num_ranks: int,
    ) -> None:
        is_copied = is_stored > 0 if pinned is None else (is_stored > 0) & (pinned < 0)
        self._groups = groups
        self._num_ranks = num_ranks
        self._num_before = np.zeros((len(is_stored) // len(groups) + 1, len(groups)), np.int64)
        np.cumsum(is_copied.reshape(-1, len(groups)), axis=0, out=self._num_before[1:])

    def num_bytes(self, begin: int, end: int) -> int:
        """Return the bytes of the blocks from `begin` on that a prefix of `end` blocks needs, of all ranks."""
        return self._num_ranks * sum(
            int(self._num_before[end, index] - self._num_before[end - num_needed(group, begin, end), index])
            * group.block_bytes
            for index, group in enumerate(self._groups)
        )


def num_needed(group: KVGroup, begin: int, end: int) -> int:
    """Return how many blocks from `begin` on a prefix of `end` blocks needs: with a window, those of the tail."""
    return min(end - begin, group.tail_blocks) if group.kind == "window" else end - begin
