"""Block pool, prefix index and scheduler (C++). Token ids are int32, request ids uint64; arrays are one-dimensional.

It has more than 400 lines because a module has only one stub.
"""

from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from swiftkv.policies import SchedulingPolicy, WritePolicy

Int32Array = npt.NDArray[np.int32]
UInt64Array = npt.NDArray[np.uint64]
UInt8Array = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

NO_BLOCK: Final[int]
"""The block-table entry for a missing block, such as one that a sliding window has left; kernels never follow it."""
PRIORITIES_PER_CLASS: Final[int]
"""The distance between the priorities of one class and the next; those around 0 belong to class 1."""

def blake3(data: bytes) -> bytes:
    """Return the BLAKE3 hash of `data`: 32 bytes."""

def block_keys(namespace: bytes, token_ids: Int32Array, block_size: int) -> bytes:
    """Return the keys of all full blocks of `token_ids`, 32 bytes each, concatenated.

    The key of a block is BLAKE3 of its tokens (little-endian int32), keyed with the key of the block before it; the
    first is keyed with BLAKE3 of `namespace`. Raises ValueError if `block_size` is not positive.
    """

class GroupSpec:
    """One KV group: its layers, its blocks, and its sliding window in tokens (0: full attention).

    `layer_block_bytes` and `base_offset_bytes` (of the group's first block in the pool) give the offsets of copies.
    With `blocks_per_extent` all groups have their blocks in extents of one pool, each owned by one group at a time:
    `num_blocks` is then the most that the group can have.

    A group without a window may have `num_host_blocks` chunks of host memory in which its blocks are attended where
    they lie. Counted in layer blocks from the group's first block in the pool, they begin at `host_first`, each
    `host_stride` after the one before.

    Steps copy the blocks of other groups from chunks of host memory: `num_source_chunks` of one block each, side by
    side from `source_offset_bytes` of the memory on.
    """

    num_layers: Final[int]
    num_blocks: Final[int]
    window: Final[int]

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        window: int = 0,
        layer_block_bytes: int = 0,
        base_offset_bytes: int = 0,
        blocks_per_extent: int = 0,
        host_first: int = 0,
        host_stride: int = 1,
        num_host_blocks: int = 0,
        source_offset_bytes: int = 0,
        num_source_chunks: int = 0,
    ) -> None: ...

class Link:
    """The extents that one KV group may lend to one of another engine, or borrow from it.

    Groups that share extents lend whole ones of these, as blocks of the first group. `blocks_per_extent` counts this
    engine's blocks. Only a borrower uses `extent_bytes` and `base_offset_bytes`, which say where extents lie in the
    lender's pool.
    """

    group: Final[int]
    num_extents: Final[int]
    blocks_per_extent: Final[int]
    extent_bytes: Final[int]
    base_offset_bytes: Final[int]

    def __init__(
        self,
        group: int,
        num_extents: int,
        blocks_per_extent: int,
        extent_bytes: int = 0,
        base_offset_bytes: int = 0,
    ) -> None: ...

class GroupStats:
    """Blocks of one KV group by state; free + used + cached + lent + in_flight + staging + loading + elsewhere = total.

    Blocks `elsewhere` are in extents of other groups, or of none. `staging` blocks are the layer-stream cache, which
    has room for `staging_layer_blocks`; `borrowed_*` blocks lie in extents of others.
    """

    free: Final[int]
    used: Final[int]
    cached: Final[int]
    lent: Final[int]
    in_flight: Final[int]
    staging: Final[int]
    loading: Final[int]
    elsewhere: Final[int]
    total: Final[int]
    borrowed_free: Final[int]
    borrowed_used: Final[int]
    borrowed_cached: Final[int]
    borrowed_in_flight: Final[int]
    staging_layer_blocks: Final[int]
    host_used: Final[int]
    host_cached: Final[int]
    host_in_flight: Final[int]
    host_loading: Final[int]
    pinned: Final[int]
    """The blocks in use that pins hold"""

class GroupDemand:
    """The blocks that requests want of one KV group. Peaks are since `take_demand` was last called.

    If groups share extents, the first group has the demand of all, and the others have none.
    """

    total_peak: Final[int]
    longest: Final[int]
    """The most that one request wanted"""
    total_now: Final[int]
    shortfall: Final[int]
    """The part of `total_now` that fits neither the pool (less what is lent) nor the borrowed extents"""

class SchedulerStats:
    num_running: Final[int]
    num_waiting: Final[int]
    num_preemptions_total: Final[int]
    num_displaced_total: Final[list[int]]
    """Preemptions for a request of a higher class, by the class of the preempted request, the highest first"""
    prefill_tokens_per_s: Final[float | None]
    """The expected speed of prompts beside the requests that run; None before it is known"""
    prefix_matches_total: Final[int]
    """The number of look-ups of prompts in the prefix cache; a waiting prompt is looked up again only after a change"""
    prefix_query_tokens_total: Final[int]
    prefix_hit_tokens_total: Final[int]
    borrowed_hit_tokens_total: Final[int]
    window_missed_tokens_total: Final[int]
    drafts_total: Final[int]
    """Rows of steps that had a draft"""
    draft_tokens_total: Final[int]
    accepted_draft_tokens_total: Final[int]
    """Guesses that were right"""
    step_s_total: Final[float]
    """Seconds that the committed steps took"""
    step_time_error_ratio: Final[float]
    """The mean of |predicted - measured| / measured over recent steps; 0 before any was predicted"""
    groups: Final[list[GroupStats]]

class QueuedPrompt:
    """A prompt whose request has no token yet.

    `num_left` of its tokens are not in the engine's cache. Of these, `num_coming` will be cached when other waiting
    requests have begun, and the rest must be computed.
    """

    num_tokens: Final[float]
    num_left: Final[float]
    priority: Final[int]

    def __init__(
        self,
        num_tokens: float,
        num_left: float,
        arrived_s: float,
        *,
        priority: int = 0,
        deadline_s: float = 0.0,
        flow: int = 0,
        flow_weight: float = 1.0,
        num_coming: float = 0.0,
    ) -> None: ...

class PromptPace:
    """The speed at which prompts are computed beside the answers that go on."""

    overhead_s: Final[float]
    """The time of a step beside its work on prompts"""
    step_s: Final[float]
    """The time of a full step"""

    def __init__(self, *, token_s: float, pair_s: float, overhead_s: float, spare_s: float, budget: float) -> None:
        """Give prompts `spare_s` of each step, and at most `budget` tokens."""

    def work_s(self, prompt: QueuedPrompt) -> float:
        """Return the seconds that a prompt takes, without the overhead of its steps."""

    def steps(self, prompt: QueuedPrompt, work_s: float) -> float:
        """Return the number of steps, which may be a fraction, that a prompt fills if its work takes `work_s`."""

    def computing_s(self, prompt: QueuedPrompt) -> float:
        """Return the seconds that an uninterrupted prompt takes."""

class WorkAhead:
    """The work ahead of an arriving prompt and behind it, in steps, and in seconds beside their overhead."""

    steps: Final[float]
    work_s: Final[float]
    steps_behind: Final[float]
    work_behind_s: Final[float]
    num_waiting: Final[float]
    """The prompts ahead that have not begun; those of other flows count only up to their share"""
    tokens_waiting: Final[float]
    num_begun: Final[int]
    """Prompts in progress that need not give way"""

class PromptQueue:
    """The prompts of one engine that have no token yet, as its gateway sees them. Times are of one clock."""

    def __init__(self, policy: str) -> None: ...
    def add(self, request_id: int, prompt: QueuedPrompt) -> None:
        """Note that a prompt has come. Raises ValueError if it is there already."""

    def begin(self, request_id: int, num_left: float) -> None:
        """Note that the engine has begun a prompt, and how many tokens are left; ignore one that is gone."""

    def expect(self, request_id: int, num_left: float, num_coming: float) -> None:
        """Note how many tokens are left of a waiting prompt; ignore one that has begun or is gone."""

    def remove(self, request_id: int) -> None:
        """Forget a prompt; ignore one that is gone."""

    def find(self, request_id: int) -> QueuedPrompt | None: ...
    def advance(self, now_s: float, pace: PromptPace | None) -> None:
        """Credit the time since the last call to the prompts that the engine computes, one after the other.

        The first prompt gets the time that it still needs, and the next one the rest. Without a pace none gets any.
        """

    is_empty: Final[bool]
    has_begun: Final[bool]
    """Whether the engine has begun any of the prompts"""

    def ahead_of(self, prompt: QueuedPrompt, pace: PromptPace) -> WorkAhead:
        """Return the work ahead of a prompt that arrives now."""

    def overtaking_part(self, prompt: QueuedPrompt, pace: PromptPace, wait_s: float) -> float:
        """Return the part of a wait of `wait_s` that later prompts will take, if they come at the recent rate."""

    def end_of_class(self, priority: int) -> float:
        """Return the first priority beyond the class of `priority`. Running requests from there on give way to it."""

class ForecastErrors:
    """The errors of the latest 512 forecasts of the time to the first token.

    Forecasts for similar requests have similar errors: with `hrrn`, shorter prompts that come later overtake a long
    one, but hardly ever a short one. So a request is compared with those whose prompt and forecast were about as long.
    """

    def __init__(self, part: float) -> None:
        """`part` of similar requests have their first token within the allowance."""

    def note(self, num_left: int, forecast_s: float, actual_s: float) -> None:
        """Note the time to the first token of a prompt that had `num_left` tokens left to compute."""

    def allowance(self, num_left: int, forecast_s: float) -> float:
        """Return the factor on the forecast within which `part` of similar requests had a token; 1 if there are few."""

class StepWork:
    """The sizes of a step that its time depends on."""

    num_tokens: Final[float]
    prompt_pairs: Final[float]
    """The pairs of a computed token and one that it attends to, in rows of several tokens"""
    decode_context: Final[float]
    """The tokens that rows of one token attend to"""
    num_rows: Final[float]
    num_copies: float
    """Blocks that are copied to or from a lower place"""

    def __init__(self) -> None: ...
    def add_row(self, begin: int, num_tokens: int, num_guesses: int = 0) -> None:
        """Add a row of `num_tokens` tokens after the first `begin` of its sequence.

        A token with guesses at the next ones counts as that many rows of one token, but their keys and values are read
        only once.
        """

class StepTime:
    """Predicts the time of a step from its work: a sum of six terms, fitted to measured steps.

    The fit is by least squares of relative errors, with no coefficient below 0. Steps with prompts and steps of decodes
    alone have the same weight in sum, and the latest 100 of each weigh most. The terms of tokens, rows and the step are
    then multiplied by a ratio that depends on the number of tokens: the measured time of the latest steps with about as
    many tokens, divided by what the fit says. Steps of decodes alone are also scaled by the latest few of their kind.
    """

    def __init__(self, coefficients: list[float] = ..., token_ratios: list[float] = ...) -> None:
        """Predict by these coefficients, and by ratios at 1, 2 ** 0.5, 2, ... tokens, until steps have been observed.

        Without ratios they are all 1.
        """

    @staticmethod
    def remembered(coefficients: list[float]) -> StepTime:
        """Return a predictor that goes on from coefficients fitted elsewhere.

        They count like a hundred steps of either kind. Raises ValueError unless every step takes some time by them.
        """

    def observe(self, work: StepWork, duration_s: float) -> None:
        """Note how long a step took. One that took no time is ignored."""

    def predict(self, work: StepWork) -> float:
        """Return the predicted seconds; 0 before any step was observed."""

    def longest_chunk(self, work: StepWork, begin: int, limit_s: float) -> int:
        """Return how many tokens of a prompt, after its first `begin`, a step with `work` can take within `limit_s`."""

    @property
    def is_known(self) -> bool:
        """Whether enough steps of either kind have been observed"""
    @property
    def error_ratio(self) -> float:
        """The mean of |predicted - measured| / measured over recent steps; 0 before any was predicted"""
    @property
    def coefficients(self) -> list[float]:
        """Seconds per token, pair, token of context, row and copied block, and of every step"""
    @property
    def token_ratios(self) -> list[float]:
        """The ratios at 1, 2 ** 0.5, 2, ..., 8,192 tokens"""
    @property
    def usual_coefficients(self) -> list[float]:
        """`coefficients`, but fitted to the latest 2,000 steps of each kind: for longer times and other work"""
    @property
    def usual_token_ratios(self) -> list[float]:
        """The ratios that go with `usual_coefficients`"""

class StepPlan:
    """One step: T tokens of S sequences, after R of which it samples. Arrays are views that keep the plan alive.

    If blocks are borrowed, or groups share extents, a plan may have no tokens and only copies.
    """

    @property
    def token_ids(self) -> Int32Array:
        """[T] token ids; below 0 it is ~slot, for the token that the previous step samples for that slot"""
    @property
    def has_unknown_tokens(self) -> bool: ...
    @property
    def positions(self) -> Int32Array:
        """[T]"""
    @property
    def query_starts(self) -> Int32Array:
        """[S+1] bounds of the rows of T that belong to each sequence"""
    @property
    def context_lens(self) -> Int32Array:
        """[S] tokens with KV after this step, cached and new"""
    @property
    def request_ids(self) -> UInt64Array:
        """[S]"""
    @property
    def row_slots(self) -> Int32Array:
        """[S] the slot of each request. It stays the same until the request ends or is preempted."""
    @property
    def stream_tables(self) -> list[list[Int32Array]]:
        """[buffer][group] [sum of blocks]: the layer-block index of layer 0 of each block, or NO_BLOCK.

        These are the block tables of the layers l with l % max(1, num_stream_buffers) == buffer. Layer l of entry e is
        layer block e + l; of a negative entry other than NO_BLOCK, layer block ~e for every l.
        """
    @property
    def num_stream_buffers(self) -> int:
        """1 or 2; 0: this step stages no borrowed block, and copies none from host memory"""
    @property
    def has_copies(self) -> bool: ...
    def copies(self, group: int, kind: Literal["spill", "load", "store"], buffer: int = 0) -> Int64Array:
        """Return [R, 5] runs of one group: link, peer_offset_bytes, local_offset_bytes, count, staged.

        A run copies `count` layer blocks of layer 0. In the peer's pool, they lie one block apart, and those of layer l
        lie l layer blocks further on. The same holds in our pool, unless they are staged: then they are contiguous, at
        the same address for every layer. The link that follows the last borrow link is host memory.

        Spills go to peers before any of the layer's KV is written here. Loads come before it is written or read. Stores
        go to peers once it is written.

        Raises IndexError for a group or a buffer that the step does not have, ValueError for another kind.
        """
    @property
    def table_starts(self) -> list[Int32Array]:
        """Per group [S+1]"""
    @property
    def local_moves(self) -> Int32Array:
        """[M, 3] group, block, new place: whole blocks to copy within the pool before anything else, in order"""
    @property
    def logits_rows(self) -> Int32Array:
        """[R] rows of T after which a token is sampled: a sequence's last known token, and each token of its draft"""
    @property
    def logits_seqs(self) -> Int32Array:
        """[R] the sequence, of S, that each row belongs to"""
    @property
    def work(self) -> StepWork:
        """The sizes that the step's time depends on"""
    @property
    def num_prompt_tokens_in_step(self) -> int: ...
    @property
    def new_request_ids(self) -> UInt64Array:
        """[A] requests that are admitted for the first time"""
    @property
    def new_cached_tokens(self) -> Int32Array:
        """[A] how many of their prompt tokens were found in the prefix cache"""
    @property
    def new_borrowed_starts(self) -> Int32Array:
        """[A+1] bounds of the rows of `new_borrowed_blocks` that belong to each"""
    @property
    def new_borrowed_blocks(self) -> Int32Array:
        """The numbers, rising from 0 on, of a prompt's blocks that were found in borrowed memory"""
    @property
    def new_host_starts(self) -> Int32Array:
        """[A+1] bounds of the rows of `new_host_blocks` that belong to each"""
    @property
    def new_host_blocks(self) -> Int32Array:
        """The numbers of a prompt's blocks that were found in host memory"""
    @property
    def new_arrivals_s(self) -> Float64Array:
        """[A] their times of arrival, by the clock of `schedule`"""
    @property
    def met_request_ids(self) -> UInt64Array:
        """[M] requests that have computed the front of their prompt and skip its back, which storage has loaded"""
    @property
    def met_blocks(self) -> Int32Array:
        """[M, 2] the begin and end of the blocks that each one skips"""
    @property
    def preempted_request_ids(self) -> UInt64Array:
        """[P] requests that wait again. They keep their sampled tokens, but their KV must be computed again."""

class StepResult:
    """R rows, one per row of the plan's logits_rows, and S sequences, those of the plan, both in the plan's order."""

    @property
    def request_ids(self) -> UInt64Array:
        """[R]"""
    @property
    def token_ids(self) -> Int32Array:
        """[R]"""
    @property
    def finish_reasons(self) -> UInt8Array:
        """[R] the state of the request after each token. From 3 on, the token does not count.

        - 0 running
        - 1 stop: the token is in `stop_token_ids`
        - 2 length
        - 3 aborted, since `schedule`
        - 4 dropped: a lender died; the request goes on
        - 5 broken: there was no token; the request ends
        - 6 rejected: the token was sampled after a wrong guess, or after the token that ended the request
        """
    @property
    def counts(self) -> UInt8Array:
        """[S] 1, or 0 if nothing that the step computed for the sequence is kept (aborted, dropped or broken)"""

class Scheduler:
    """Continuous batching over a block pool per KV group and a prefix index; blocks are lent to others and borrowed.

    Thread-safe; one thread steps, while others may add and abort requests, and lend, borrow and recall extents.
    Methods that take a link or extents raise ValueError, with nothing changed, for a link or an extent that does not
    exist, an extent that is named twice, and an extent in the wrong state. A broken invariant ends the process.
    """

    def __init__(
        self,
        groups: list[GroupSpec],
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        lend_links: list[Link] = [],
        borrow_links: list[Link] = [],
        stream_buffers: int = 2,
        retention_interval: int | None = None,
        target_tpot_s: float | None = None,
        long_prefill_token_threshold: int | None = None,
        max_num_partial_prefills: int | None = None,
        max_long_partial_prefills: int = 1,
        scheduling_policy: SchedulingPolicy = "priority",
        num_speculative_tokens: int | None = None,
        prompt_lookup_min: int = 1,
        prompt_lookup_max: int = 8,
    ) -> None:
        """With `target_tpot_s`, prompts get the time that decodes leave of a step, as predicted from earlier steps, but
        at least a block a step. A step takes at most `long_prefill_token_threshold` tokens of one prompt; prompts that
        have more left are long. At most `max_num_partial_prefills` prompts are computed in part at once, and at most
        `max_long_partial_prefills` long ones.

        `scheduling_policy` orders waiting requests: `fcfs` by arrival; the others by priority first, and then
        `priority` by arrival, `spf` by the tokens left to compute, `hrrn` by the waiting time in relation to these
        tokens, `turns` by the tokens left to compute and by arrival in turns, `deadline` by the earliest deadline.

        With `num_speculative_tokens`, requests get drafts of up to that many tokens. They are copied from a place where
        the request's last tokens, from `prompt_lookup_min` to `prompt_lookup_max` of them, occurred before. A draft has
        only guesses that pay: judged by the request's latest guesses, each must be right more often than the part of a
        step's time that it takes.

        Raises ValueError for sizes that cannot work, for example if a group has too few blocks for one sequence of
        `max_model_len` tokens even when all links lend all they can."""

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
        arrival_s: float = 0.0,
        deadline_s: float = ...,
        flow: int = 0,
        flow_weight: float = 1.0,
    ) -> None:
        """Queue a request; `scheduling_policy` says which one goes first.

        `namespace` separates caches: model, adapter and salt. With `skip_prefix_match` every position is computed.
        `arrival_s` is the time of arrival, by the clock of `schedule`; `deadline_s` the time at which the first token
        is due, if any. Flows, numbered from 0 to 1023, share the engine by their weights; a new weight counts from now
        on.
        Raises ValueError if the id is known, or the prompt is empty, not shorter than `max_model_len`, or has a token
        id below 0, or the flow or the weight (0.01 to 100) is out of range.
        """

    def abort(self, request_ids: UInt64Array) -> None:
        """Forget requests at once, at any time; unknown ids are ignored."""

    def set_draft(self, request_id: int, token_ids: Int32Array) -> None:
        """Set the draft of a request, guesses at its next tokens, in place of any earlier draft.

        The next step that decodes the request computes as many of them as there is room for after all others, and
        samples after each: so it yields the token that would come without a draft, and one more for each right guess.
        A draft is forgotten when its request gets a token, so a draft that is set while a step in progress samples for
        the request is lost. A draft for an unknown id is ignored.

        Raises ValueError for a token id below 0; the caller checks that none exceeds the vocabulary.
        """

    def has_work(self) -> bool: ...
    def schedule(self, now_s: float = 0.0) -> StepPlan | None:
        """Return the next step; None if nothing can run, or not before a step in progress is committed.

        Raises RuntimeError while two steps are in progress.
        """

    def commit(self, sampled: Int32Array, duration_s: float = 0.0) -> StepResult:
        """End the oldest step in progress, whose KV is written.

        `sampled` has a token for each of its `logits_rows`. Below 0, there is no token: the request ends, and the
        step's KV for it is not kept. `duration_s` is the step's duration; 0: unknown.

        Raises ValueError if the number of tokens is wrong, RuntimeError if no step is in progress.
        """

    def abandon(self) -> None:
        """Give up the only step in progress, instead of `commit`, because its copies failed.

        Its results are discarded, and its requests are computed again.
        """

    def starved(self, now_s: float, max_wait_s: float) -> list[int]:
        """Return the requests that have waited `max_wait_s` for memory that they would not get even alone."""

    def lend(self, link: int, max_extents: int) -> Int32Array:
        """Take up to `max_extents` out of the pool; cached blocks in them are forgotten, used ones stay.

        Raises ValueError if `max_extents` is negative.
        """

    def take_back(self, link: int, extents: Int32Array) -> None:
        """Put extents that came home back into the pool as free blocks."""

    def take_demand(self) -> list[GroupDemand]:
        """Return the demand of each KV group, and reset its peaks."""

    def is_short(self) -> bool:
        """Return whether requests want more blocks of some group than there are, while some of its blocks are lent."""

    def borrow(self, link: int, extents: Int32Array) -> None:
        """Let blocks lie in these extents from now on."""

    def recall(self, link: int, extents: Int32Array) -> None:
        """Put nothing new into these extents; blocks in them move or are forgotten in the next step."""

    def take_returned(self, link: int) -> Int32Array:
        """Return recalled extents that are drained, each once."""

    def lose(self, link: int) -> None:
        """Forget all extents of a lender that is gone. Requests that needed them are computed again."""

    def begin_loading(self, key: bytes) -> Int32Array:
        """Take a free local block of each KV group for a block key whose bytes are on their way.

        Requests that would find the key wait for it. Empty if the key is known, some group has no free block, or a
        running request waits for the room of loading blocks.
        """

    def end_loading(self, blocks: Int32Array, is_loaded: bool) -> None:
        """Note that the bytes have come, or never will; `blocks` are those of one `begin_loading`."""

    def set_write_policy(self, write_policy: WritePolicy | Literal["never"]) -> None:
        """Set the blocks that are offered to storage from now on.

        - `write_through`: every committed block; also all present blocks now, the last used first.
        - `write_through_selective`: every block that another request has found.
        - `write_back`: the blocks that are evicted next, but only when `take_offers` asks. It offers as many as must be
          stored for a quarter of each group's blocks to be free or stored.
        - `never`: none; every offer is taken back.

        Sliding-window groups offer only the tails of kept boundaries.
        """

    def take_offers(self, max_blocks: int) -> tuple[bytes, Int32Array, Int32Array, Int64Array]:
        """Return up to `max_blocks` blocks that storage should have: keys (32 bytes each), groups, links and offsets.

        An offset says where a block's bytes lie: in the pool of the link's lender, or in our own if the link is -1. An
        offset behind our own pool is one of host memory, as in `begin_load`.
        They stay there until `end_copying`, which must come before the next `schedule`. No block is returned while a
        step in progress copies blocks. Offered blocks that have left all pools count as dropped.
        """

    def end_copying(self) -> None:
        """Note that the blocks from `take_offers` have been copied; extents come and go again."""

    def offer_prefix(self, keys: bytes) -> None:
        """Offer the present blocks of a prefix to storage, whatever the write policy. Keys have 32 bytes each."""

    def num_offers(self) -> int:
        """Return how many blocks are on offer."""

    def num_dropped_offers(self) -> int: ...
    def hold(self, request_id: int) -> None:
        """Keep a waiting request from being admitted until `let_go`; others go on. Unknown ids are ignored."""

    def let_go(self, request_id: int) -> None: ...
    def look_up(self, request_id: int) -> tuple[bytes, UInt8Array, int]:
        """Return the keys of the K blocks that a waiting request could find, whether each is in the pools
        ([K * groups]), and how many leading blocks it could use now.
        """

    def prefill_s(self, begin: int, end: int) -> float | None:
        """Return the seconds that computing tokens `begin` to `end` of a prompt, in chunks, is expected to take.

        The decodes that run now are taken into account; `None` before enough steps were measured.
        """

    def evicted_age_s(self, key: bytes) -> float | None:
        """Return the seconds since a block was evicted; `None` if it was not, or the eviction is forgotten."""

    def loadable(
        self, request_id: int, is_stored: UInt8Array, max_blocks: int, pinned: Int32Array | None = None
    ) -> int:
        """Return how many leading blocks a waiting request could use, from the pools and from storage together.

        `is_stored` ([K * groups]) says which blocks storage has, and `pinned` ([K * groups]) the chunks of host memory
        that the caller has pinned for them, -1 where there is none. The result is at most `max_blocks`, and no more
        than the local pool can hold beside pinned chunks. Raises ValueError if an array has the wrong length, or there
        is no such chunk.
        """

    def begin_load(
        self, request_id: int, num_blocks: int, first: int = 0, pinned: Int32Array | None = None
    ) -> tuple[Int32Array, Int32Array, Int32Array, Int64Array, UInt8Array]:
        """Take a block for each of a waiting request's blocks `first` to `num_blocks` that is missing.

        Other cached blocks are evicted for them. Room is left for the blocks before `first`, which are computed.
        Requests that would find the new blocks wait for them.

        A block whose chunk of host memory is `pinned`, as in `loadable`, is attended there, or the next step copies it
        from there into the pool. The scheduler takes over the pin, and gives it back through `take_unpinned`. It may
        leave a pin alone, and take a block of the pool for storage to read into.

        Return for each block the index of its key, its group, its number, the offset of its bytes from the beginning of
        the pool, and whether the scheduler has taken over its pin. The offset of a block that is attended in host
        memory is no less than the pool's size; only such a pinned block needs `end_load`.
        Return none if there is no room or nothing to load, while a running request waits for the room of loading
        blocks, and while a step in progress copies blocks.
        """

    def take_unpinned(self) -> Int32Array:
        """Return the chunks of host memory that are not used any more, each once for every pin that was taken over."""

    def evict_host(self) -> bool:
        """Evict all cached blocks in host memory.

        Return false, with nothing changed, while a step in progress copies blocks.
        """

    @property
    def can_meet(self) -> bool:
        """Whether the front of a prompt can be computed while storage loads its back.

        It cannot if prompts are computed whole, nor without full attention: only the tail of a window is loaded.
        """
    def meet(self, request_id: int, num_blocks: int) -> None:
        """Let a waiting request begin while storage loads its back: the blocks before `num_blocks`, the last one first.

        The request computes its front, and skips the rest of the back as soon as all of that has been loaded. Raises
        ValueError if the request has fewer keys. Unknown ids are ignored.
        """

    def num_planned_blocks(self, request_id: int) -> int:
        """Return how many of a request's blocks are computed, including steps in progress; 0 for an unknown request."""

    def forget_loading(self, groups: Int32Array, blocks: Int32Array) -> None:
        """Let no request wait for these loading blocks, whose bytes may still be on their way.

        Raises ValueError, with nothing changed, unless all are loading; so does `end_load`.
        """

    def end_load(self, groups: Int32Array, blocks: Int32Array, is_loaded: bool) -> None:
        """Note that the bytes of these blocks have come, or never will."""

    def enable_kv_events(self, max_events: int) -> None:
        """Keep up to `max_events` events of the prefix index from now on. One more replaces all of them with "cleared".

        Raises ValueError unless the number is positive.
        """

    def take_kv_events(self) -> tuple[UInt8Array, UInt8Array, Int32Array, UInt8Array, bytes, bytes, Int32Array]:
        """Return the E events since the last call: kinds, places, groups, texts, keys, parents and token ids.

        A kind is 0 (stored), 1 (removed) or 2 (cleared); a place is 0 (local), 1 (peer) or 2 (host). Keys and parents
        have 32 bytes each. A text is 1 or 2 for a stored block whose tokens are known, block after block: 1 for the
        first block of a prompt, whose parent is the key of its namespace, 2 for others.
        """

    def resident_blocks(self) -> tuple[bytes, Int32Array, UInt8Array]:
        """Return all blocks that the prefix index knows and whose bytes are present: keys, groups and places.

        All events since the scheduler began add up to them. Keys have 32 bytes each.
        """

    def pin(self, pin_id: int, keys: bytes, max_share: float) -> tuple[int, float, bool]:
        """Keep the longest usable prefix of `keys` in the local pool and in host memory, until `unpin`.

        Return its length in blocks, the share of the pool that all pins then take, and whether it is kept: it is not if
        the length is 0 or the share exceeds `max_share`. A pin gives way to a request that could otherwise not run even
        alone. Keys have 32 bytes each.

        Raises ValueError if the pin is already known.
        """

    def unpin(self, pin_id: int) -> bool:
        """End a pin, and return whether there was one."""

    def take_lost_pins(self) -> UInt64Array:
        """Return the pins that were given up for a request, or lost their bytes, since the last call."""

    def stats(self) -> SchedulerStats: ...
    def step_time(self) -> StepTime:
        """Return a copy of the step-time predictor, fitted to the durations passed to `commit`."""

    def remember_step_time(self, coefficients: list[float]) -> None:
        """Predict steps by another scheduler's coefficients. Raises ValueError as `StepTime.remembered` does."""

    def check_invariants(self) -> None:
        """Raise RuntimeError, naming the invariant that does not hold. Slow: for tests."""

    def reset_prefix_cache(self) -> None:
        """Free every cached block that no running request holds."""
