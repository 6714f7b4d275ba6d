"""Block pool, prefix tree and scheduler (C++). Token ids are int32, request ids uint64; arrays are one-dimensional."""

from typing import Final

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
UInt64Array = npt.NDArray[np.uint64]
UInt8Array = npt.NDArray[np.uint8]

NO_BLOCK: Final[int]
"""Block-table entry of a block that the sliding window has left behind; kernels never follow it."""

def blake3(data: bytes) -> bytes:
    """BLAKE3 of `data`: 32 bytes."""

def block_keys(namespace: bytes, token_ids: Int32Array, block_size: int) -> bytes:
    """Keys of all full blocks of `token_ids`, 32 bytes each, concatenated.

    The key of a block is BLAKE3 of its tokens (little-endian int32), keyed with the key of the block before it; the
    first is keyed with BLAKE3 of `namespace`. Raises ValueError if `block_size` is not positive.
    """

class GroupSpec:
    """One KV group: its layers, its blocks, and its sliding window in tokens (0: full attention)."""

    num_layers: Final[int]
    num_blocks: Final[int]
    window: Final[int]

    def __init__(self, num_layers: int, num_blocks: int, window: int = 0) -> None: ...

class GroupStats:
    """Blocks of one KV group by state: free + used + cached + lent + in_flight = total."""

    free: Final[int]
    used: Final[int]
    cached: Final[int]
    lent: Final[int]
    in_flight: Final[int]
    total: Final[int]

class SchedulerStats:
    num_running: Final[int]
    num_waiting: Final[int]
    num_preemptions_total: Final[int]
    prefix_query_tokens_total: Final[int]
    prefix_hit_tokens_total: Final[int]
    groups: Final[list[GroupStats]]

class StepPlan:
    """One step: T tokens of S sequences, R of which need a successor. Arrays are views that keep the plan alive."""

    @property
    def token_ids(self) -> Int32Array:
        """[T]"""
    @property
    def positions(self) -> Int32Array:
        """[T]"""
    @property
    def query_starts(self) -> Int32Array:
        """[S+1] rows of T that belong to each sequence"""
    @property
    def context_lens(self) -> Int32Array:
        """[S] tokens with KV after this step, cached and new"""
    @property
    def request_ids(self) -> UInt64Array:
        """[S]"""
    @property
    def row_slots(self) -> Int32Array:
        """[S] small index, the request's own as long as it runs; a request that was preempted may get another"""
    @property
    def block_tables(self) -> list[Int32Array]:
        """Per group [sum of blocks]: layer-block index of layer 0 of each block, or NO_BLOCK.

        Layer l of entry e is layer block e + l; of a negative entry other than NO_BLOCK, layer block ~e for every l.
        """
    @property
    def table_starts(self) -> list[Int32Array]:
        """Per group [S+1]"""
    @property
    def logits_rows(self) -> Int32Array:
        """[R] rows of T whose successor is to be sampled"""
    @property
    def logits_seqs(self) -> Int32Array:
        """[R] the sequence, of S, that each belongs to"""
    @property
    def num_prompt_tokens_in_step(self) -> int: ...
    @property
    def new_request_ids(self) -> UInt64Array:
        """[A] admitted for the first time"""
    @property
    def new_cached_tokens(self) -> Int32Array:
        """[A] how many of their prompt tokens were found in the prefix cache"""
    @property
    def preempted_request_ids(self) -> UInt64Array:
        """[P] sent back to wait; they will be computed anew, what was sampled is kept"""

class StepResult:
    """One row per row of the plan's logits_rows, in the same order."""

    @property
    def request_ids(self) -> UInt64Array:
        """[R]"""
    @property
    def token_ids(self) -> Int32Array:
        """[R]"""
    @property
    def finish_reasons(self) -> UInt8Array:
        """[R] 0 running, 1 stop (the token is in stop_token_ids), 2 length, 3 aborted since schedule(): ignore it"""

class Scheduler:
    """Continuous batching over a block pool per KV group and a prefix tree. Belongs to one thread."""

    def __init__(
        self,
        groups: list[GroupSpec],
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
    ) -> None:
        """Raises ValueError, also if a group has too few blocks for one sequence of `max_model_len` tokens."""

    def add_request(
        self,
        request_id: int,
        prompt: Int32Array,
        max_tokens: int,
        min_tokens: int,
        stop_token_ids: Int32Array,
        namespace: bytes,
        skip_prefix_match: bool,
        priority: int = 0,
    ) -> None:
        """Queues a request; lower `priority` goes first, then arrival.

        `namespace` separates caches: model, adapter and salt. With `skip_prefix_match` every position is computed.
        Raises ValueError if the id is known, or the prompt is empty or not shorter than `max_model_len`.
        """

    def abort(self, request_ids: UInt64Array) -> None:
        """Forgets requests at once, at any time; unknown ids are ignored."""

    def has_work(self) -> bool: ...
    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can run. Raises RuntimeError if the step before was not committed."""

    def commit(self, sampled: Int32Array) -> StepResult:
        """Makes the plan's step history: its KV is written, and `sampled` has one token per row of logits_rows.

        Raises ValueError if the number of tokens is wrong, RuntimeError if no step is in progress.
        """

    def stats(self) -> SchedulerStats: ...
    def check_invariants(self) -> None:
        """Raises RuntimeError, naming the invariant that does not hold. Slow: for tests."""

    def reset_prefix_cache(self) -> None:
        """Frees every cached block that no running request holds."""
