"""The messages between the gateway and an engine: msgspec structs, as MessagePack over ZeroMQ.

Arrays of numbers travel as little-endian bytes, so that neither side touches tokens one by one:
`np.frombuffer(message.token_ids, np.int32)`. The engine trusts the framing, never the values: it answers a mistake in
a request with `RequestError`. The file has more than 400 lines because it is the whole protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from swiftkv.histogram import Histogram
from swiftkv.lease.messages import GroupBlocks, LeasedBytes, LendingSpec
from swiftkv.policies import SchedulingPolicy, Task
from swiftkv.tier.messages import LoadStop, TierSpec, TierStats
from swiftkv.units import PoolMemory

MAX_MESSAGE_BYTES = 256 << 20
"""ZMQ_MAXMSGSIZE of both sockets; the largest real message is the prompt logprobs of a long prompt."""

HIGH_WATER_MARK = 10_000
"""ZMQ_SNDHWM and ZMQ_RCVHWM of both sockets, in messages."""

(
    FINISH_RUNNING,
    FINISH_STOP,  # the token is the stop token itself
    FINISH_LENGTH,
    FINISH_ABORTED,
    FINISH_DROPPED,  # blocks that the step needed were lost: the request is computed again
    FINISH_BROKEN,  # the logits were not finite: there is no token
    FINISH_REJECTED,  # the token was sampled after a wrong guess, or after the one that ended its request
) = range(7)
"""Values of `StepOutput.finish_reasons`. From FINISH_ABORTED on they stay between scheduler and engine: a token with
such a reason does not count, and no client gets it."""

DURATION_BOUNDS_S = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
"""Upper bounds of the buckets of an engine's histograms, in seconds."""

STEP_TOKENS_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the buckets of `EngineStats.step_tokens`: vLLM's."""

HIT_TIERS = ("local", "peer", "host", "storage")
"""The tiers in which prompts find their KV, the nearest first."""

POOLED_TOKEN = 0
"""The token that is committed for a pooled request, which samples none. It is the request's stop token, and ends it."""

_DEADLINES_PER_WATCHDOG = 4  # the watchdog ends an engine whose step waits for this many silent lenders in turn

EXIT_LOAD_FAILED = 3
"""Exit code of an engine whose model cannot be loaded: starting it again would not help."""

EXIT_NO_ROOM = 4
"""Exit code of an engine that found its device full. A later start may succeed: the pool of an engine that died keeps
its memory until every borrower has detached it."""

EXIT_GAVE_UP = 5
"""Exit code of a follower that found another rank gone, or waited for it in vain. Rank 0 says which that was."""


class KVEventsSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sockets and queues of an engine's KV events, from `kv_events_config`."""

    endpoint: str
    replay_endpoint: str | None = None  # None: no batch can be asked for again
    buffer_steps: int = 10_000  # batches that are kept for subscribers that ask again
    hwm: int = 100_000  # the most batches that wait for one subscriber; further ones are dropped for it
    max_queue_size: int = 100_000  # the most batches that wait to be sent
    topic: str = ""
    encoding: Literal["map", "array"] = "map"


class PromptLookup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `speculative_config` of a model, as the arguments of the scheduler."""

    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int


class ShareSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine's account in a `ShareTable` of the node, and its `compute` section."""

    resource: Literal["cores", "gpu"]  # what the engines with accounts in this table share
    table_fd: int  # the process inherits it
    account: int
    weight: int
    max_share: float  # the most of all cores, or of the GPU's time, up to 1


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The configuration of an engine process: one JSON line on its standard input. The engine ends with that input."""

    name: str
    path: str  # directory in Hugging Face format
    requests_address: str  # ipc://…: the gateway binds PUSH here, the engine connects PULL
    outputs_address: str  # ipc://…: the gateway binds PULL here, the engine connects PUSH
    memory: PoolMemory  # the size of the pool
    max_model_len: int
    task: Task = "generate"  # with any other task every request is pooled
    device: str = "cpu"  # cuda:N for rank 0 means cuda:N+1 for rank 1
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    threads: int = 1  # threads of each rank
    block_size: int = 16
    retention_interval: int | None = None  # tokens, as `kv_cache.retention_interval`
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    scheduling_policy: SchedulingPolicy = "priority"
    target_ttft_s: float = 10.0  # seconds until the first token of a request without a target is due
    target_tpot_s: float | None = None  # the most that a step with decodes should take, prompts included
    long_prefill_token_threshold: int | None = None  # the most tokens of one prompt in a step; with more, it is long
    max_num_partial_prefills: int | None = None  # the most prompts that are computed in part at once
    max_long_partial_prefills: int = 1  # the most long prompts among them
    prompt_lookup: PromptLookup | None = None  # None: no drafts
    enable_prefix_caching: bool = True
    max_pinned_share: float = 0.25  # the most of the pool that pins may take
    enable_chunked_prefill: bool = True
    enforce_eager: bool = False  # no CUDA graphs
    async_scheduling: bool = False  # a step is planned and launched while the one before it is computed
    shares_extents: bool = False  # KV groups share one pool, if their blocks have an extent in common
    lending: LendingSpec | None = None  # None: lends and borrows nothing
    storage: TierSpec | None = None  # None: blocks that the pool evicts are lost
    kv_events: KVEventsSpec | None = None  # None: no events
    tensor_parallel_size: int = 1  # ranks, each a process with its part of the model
    rank: int = 0  # the number of this process among them; the gateway knows only rank 0
    watchdog_s: float = 120.0  # an engine without progress for so long is ended; waits within a step have to be shorter
    ranks_directory: str = ""  # where ranks find each other; rank 0 makes it, with mode 0700
    has_served: bool = False  # an earlier process of this engine has served, so its storage could be opened then
    step_time_s: list[float] = []  # the costs of STEP_TIME_TERMS, learnt by an earlier process; empty: not known
    incarnation: int = 0  # random, repeated in `Ready`: tells this start of the engine from others
    share: ShareSpec | None = None  # None: the operating system alone divides the cores
    log_level: str = "info"
    progress_fd: int | None = None  # a `ProgressPage` that the process inherits; ranks other than 0 have none

    @property
    def inherited_fds(self) -> tuple[int, ...]:
        """The descriptors, beside `progress_fd`, that the process inherits."""
        host_fd = None if self.storage is None else self.storage.host_fd
        table_fd = None if self.share is None else self.share.table_fd
        return tuple(fd for fd in (host_fd, table_fd) if fd is not None)

    @property
    def copy_deadline_s(self) -> float:
        """The longest wait for one peer in the middle of a copy."""
        return self.watchdog_s / _DEADLINES_PER_WATCHDOG


class ReasoningMarks(msgspec.Struct, array_like=True, frozen=True):
    """The tokens that separate reasoning, where no grammar applies, from the rest of the answer."""

    end: list[int]  # the reasoning ends with these tokens in a row
    begin: int | None = None  # opens the reasoning if it is the answer's first token; None: the answer begins inside
    is_last: bool = False  # the answer may end within the reasoning, as it does after the call of a tool


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """The parameters of sampling, with vLLM's meanings; `seed=None` draws a fresh seed."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None  # None: off; k: the sampled token's and the k likeliest
    prompt_logprobs: int | None = None
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    grammar: str | None = None  # the grammar of the answer, as `grammars.library_form` writes it; not with `ignore_eos`
    reasoning: ReasoningMarks | None = None  # None: the grammar holds from the first token
    allowed_token_ids: list[int] | None = None  # None: all
    bad_words: list[list[int]] = []  # each a word's tokens, which the answer never has in a row
    thinking_budget: int | None = None  # the most tokens of reasoning, only with `reasoning`; None: no limit


class Pooling(msgspec.Struct, array_like=True, frozen=True):
    """Marks a pooled request, which wants numbers from its prompt's last position and no tokens.

    A model that scores returns the logits of `token_ids`, one that embeds the hidden state after its final norm.
    """

    token_ids: list[int] = []


class AddRequest(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Has the engine serve one prompt: generate one sequence, or pool it."""

    request_id: int  # uint64, never reused
    prompt: bytes  # int32
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0  # lower runs first; includes that of the service tier
    target_ttft_s: float | None = None  # when its first token is due; None: the model's
    pooling: Pooling | None = None  # None: it wants tokens
    is_traced: bool = False  # its part in each step is reported as a `StepTrace`
    flow: int = 0  # the share of the engine that the request takes from
    flow_weight: float = 1.0
    is_to_last: bool = False  # its prompt goes to storage, if there is any, whatever the write policy
    arrived_s: float | None = None
    """The time of its arrival at the gateway, on CLOCK_MONOTONIC, which all processes share: `time.perf_counter` and
    `time.monotonic` both read it. `None`: the time at which the engine takes it, between two steps."""


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Ends requests without another message; ids that are unknown or finished are ignored."""

    request_ids: list[int]


class Sleep(msgspec.Struct, tag="sleep", array_like=True, frozen=True):
    """Has the engine give up its weights. It keeps its pool and goes on lending. No request may run or arrive then."""


class Wake(msgspec.Struct, tag="wake", array_like=True, frozen=True):
    """Has the engine load its weights again. If it cannot, it ends as if it could not load them at its start."""

    give_way_s: float = 0.0  # the most seconds for which the load gives way to other work


class AttachStorage(msgspec.Struct, tag="attach_storage", array_like=True, frozen=True):
    """Has the engine open storage, and use it from then on. Requests go on meanwhile."""

    change_id: int
    storage: TierSpec  # with the host memory of an engine that has some


class DetachStorage(msgspec.Struct, tag="detach_storage", array_like=True, frozen=True):
    """Has the engine close its storage, and compute the blocks that it wanted to read. Requests go on meanwhile.

    Host memory stays.
    """

    change_id: int


class CacheCommand(msgspec.Struct, tag="cache", array_like=True, frozen=True):
    """Asks what prompts found in the cache, and may empty it; answered by `CacheReport`."""

    call: int  # a number that the answer repeats
    explain: list[int] = []  # ids of requests
    clear: bool = False  # forget every cached block that no running request holds


class Pin(msgspec.Struct, tag="pin", array_like=True, frozen=True):
    """Keeps the prompt of a request in the pool; answered by `CacheReport`."""

    call: int
    request_ids: list[int]  # the first that the engine remembers is pinned
    ttl_s: float


class PinPrompt(msgspec.Struct, tag="pin_prompt", array_like=True, frozen=True):
    """Keeps the blocks that the pool has of a prompt; answered by `CacheReport`."""

    call: int
    prompt: bytes  # int32 token ids
    cache_salt: str
    ttl_s: float


class Unpin(msgspec.Struct, tag="unpin", array_like=True, frozen=True):
    """Ends a pin; answered by `CacheReport`."""

    call: int
    pin_id: int


CacheCall = CacheCommand | Pin | PinPrompt | Unpin


class Shutdown(msgspec.Struct, tag="shutdown", array_like=True, frozen=True):
    """Has the engine exit with code 0 before its next step; what still runs is dropped."""


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The first message of an engine: the model is loaded."""

    model: str
    pid: int
    max_model_len: int
    vocab_size: int
    num_blocks: int  # blocks for whole sequences
    pool_bytes: int
    block_size: int
    eos_token_ids: list[int]
    incarnation: int  # the one of `EngineConfig`


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities at one position, of the model's raw distribution (before temperature and penalties)."""

    logprob: float  # the log-probability of the token that stands there
    rank: int  # 1: the likeliest
    top_ids: list[int]  # the k likeliest, in falling order
    top_logprobs: list[float]

    def with_top(self, count: int) -> TokenLogprobs:
        """Return the entry with no more than the `count` likeliest tokens."""
        return TokenLogprobs(self.logprob, self.rank, self.top_ids[:count], self.top_logprobs[:count])


STEP_TIME_TERMS = ("token", "pair", "context", "row", "copy", "step")
"""The coefficients of `StepTime`, in its order: seconds per token, per pair of a prompt token and an earlier token that
it attends to, per token that a decode attends to, per row, per copied block, and per step.
"""

TOKEN_POINTS = tuple(f"{2 ** (i / 2):.4g}" for i in range(27))
"""The numbers of tokens of a step for which `StepTime` has a ratio: two for each doubling, from 1 to 8,192."""


class ComputeStats(msgspec.Struct, array_like=True, frozen=True):
    """The time of an engine that shares cores or a GPU with others by weight."""

    core_s_total: float  # core time that its process has used, or time that its steps have taken on the GPU
    waited_s_total: float  # time that its steps have waited for turns


class PinView(msgspec.Struct, array_like=True, frozen=True):
    """A prefix that is kept in the pool."""

    pin_id: int
    num_tokens: int
    ends_s: float  # when its time is over, by `time.monotonic`, which all processes share
    is_lost: bool  # a request needed its blocks, or their bytes were lost


class EngineStats(msgspec.Struct, array_like=True, frozen=True):
    """Totals count from the start of the engine. Blocks are of all KV groups together."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int  # held by running requests; shared prefixes count once
    num_cached_blocks: int  # reusable, given up when others need them
    num_preemptions_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    steps_total: int
    prompt_tokens_total: int  # computed, not taken from the cache
    generation_tokens_total: int
    prefix_hit_tokens_peer_total: int = 0  # the part of `prefix_hit_tokens_total` found in borrowed blocks
    window_missed_tokens_total: int = 0  # cached tokens that could not be used, because a window's tail was gone
    kv_tokens_local: int = 0  # tokens whose KV, in use or cached, lies in the engine's own pool
    kv_tokens_peer: int = 0  # the same in borrowed blocks
    kv_tokens_host: int = 0  # the same in blocks of host memory that are attended where they lie
    layer_stream_load: Histogram | None = None  # per step that copies: from lenders and host memory
    layer_stream_store: Histogram | None = None  # the same of copies to lenders
    layer_stream_exposed: Histogram | None = None  # the part of both for which computing waited
    cuda_graph_hits_total: int | None = None  # decode steps that were replayed; None: there are no graphs
    cuda_graph_misses_total: int | None = None  # decode steps that ran eagerly
    step_time_error_ratio: float = 0.0  # the recent mean of |predicted - measured| / measured step time
    prefill_tokens_per_s: float | None = None  # expected rate of prompts beside running requests; None: not known yet
    step_time_s: list[float] = []  # seconds of each of STEP_TIME_TERMS; empty until enough steps were measured
    compute: ComputeStats | None = None  # None: it is not counted
    expert_load_factors: dict[int, float] = {}  # mean over maximum of recent tokens per expert, by layer
    tier: TierStats | None = None  # None: neither host memory nor storage
    groups: list[GroupBlocks] = []  # blocks of each KV group by state
    drafts_total: int = 0  # sequences of steps that had a draft
    draft_tokens_total: int = 0
    accepted_draft_tokens_total: int = 0
    num_displaced_total: list[int] = []  # the part of `num_preemptions_total` for a higher tier, by service tier
    pins: list[PinView] = []
    usual_step_time_s: list[float] = []  # `step_time_s` fitted to thousands of steps, for the long run
    usual_token_ratios: list[float] = []  # by TOKEN_POINTS: measured time divided by that fit's time
    step_tokens: Histogram | None = None  # per step: its tokens of prompts, and those that it generated

    def hit_tokens_by_tier(self) -> dict[str, int]:
        """Return `prefix_hit_tokens_total` by where the KV lay, for all of HIT_TIERS."""
        levels = [] if self.tier is None else self.tier.levels
        elsewhere = {level.tier: level.hit_tokens_total for level in levels}
        return _by_tier(self.prefix_hit_tokens_total, {"peer": self.prefix_hit_tokens_peer_total, **elsewhere})


def _by_tier(num_tokens: int, elsewhere: Mapping[str, int]) -> dict[str, int]:
    """Return tokens for all of HIT_TIERS; those that are not `elsewhere` are local."""
    counts = {tier: elsewhere.get(tier, 0) for tier in HIT_TIERS}
    return counts | {"local": num_tokens - sum(elsewhere.values())}


class Admitted(msgspec.Struct, array_like=True, frozen=True):
    """An admitted request, and the prompt tokens that it found in the cache.

    It is sent again, with new totals, if the request finds more before its first token.
    """

    request_id: int
    cached_tokens: int
    elsewhere: dict[str, int] = {}  # by tier: tokens whose KV lay outside of the engine's own pool

    def hit_tokens_by_tier(self) -> dict[str, int]:
        """Return `cached_tokens` by where the KV lay, for all of HIT_TIERS."""
        return _by_tier(self.cached_tokens, self.elsewhere)


class StepTrace(msgspec.Struct, array_like=True, frozen=True):
    """The part that a traced request had in one step. Times are Unix time; `exposed_s` is of the whole step."""

    request_id: int
    began_ns: int
    ended_ns: int
    num_prompt_tokens: int  # computed in this step; 0: it only decoded
    exposed_s: float  # time that computing waited for copies from and to lenders
    leased: LeasedBytes | None = None  # bytes that changed hands since the request's last part; None: none did


class StepOutput(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """The outcome of one step. The three arrays have one entry per token; a request's tokens are in order.

    `stats` comes at most every 100 ms while the engine is busy, and always when it becomes idle. So the last stats are
    right for an idle engine. A message may have stats alone.
    """

    request_ids: bytes  # uint64
    token_ids: bytes  # int32
    finish_reasons: bytes  # uint8
    admitted: list[Admitted] = []
    logprobs: dict[int, list[TokenLogprobs]] | None = None  # for each token, by id of the requests that asked
    prompt_logprobs: dict[int, list[bytes]] | None = None  # with the first token: see `pack_prompt_logprobs`
    stats: EngineStats | None = None
    messages_taken: int = 0  # from the gateway, since the engine started; any more that it sent still wait
    pooled: dict[int, bytes] | None = None  # float32, by id of a pooled request, which ends with it
    traces: list[StepTrace] | None = None  # the step's part in every traced request
    ended_s: float | None = None  # when the tokens were known, by `time.perf_counter`, which all processes share


class Slept(msgspec.Struct, tag="slept", array_like=True, frozen=True):
    """Answers `Sleep`: the weights are given up."""

    incarnation: int  # the one of `EngineConfig`


class Woken(msgspec.Struct, tag="woken", array_like=True, frozen=True):
    """Answers `Wake`: the weights are loaded."""

    incarnation: int  # the one of `EngineConfig`


class StorageChanged(msgspec.Struct, tag="storage_changed", array_like=True, frozen=True):
    """Answers `AttachStorage` and `DetachStorage` when the change is over; statistics that show it came before."""

    change_id: int
    why_not: str | None  # None: it was done


CacheStop = Literal["complete", "prompt_logprobs", "tail_gone", "evicted", "other_salt", "never_stored"] | LoadStop
"""The reasons why a match stopped: all usable blocks were found; log-probabilities of the prompt must be computed; a
window's KV before the end is gone; the block was evicted; it is known with another salt; it was never computed, as far
as the engine remembers; or a tier below the pool gave less than it had."""


class Explanation(msgspec.Struct, array_like=True, frozen=True):
    """The reason why a request found no more of its prompt in the cache."""

    request_id: int
    prompt_tokens: int
    cached_tokens: int
    reason: CacheStop
    age_s: float | None = None  # if the reason is an eviction: the seconds from it to the request's beginning


class CacheReport(msgspec.Struct, tag="cache_report", array_like=True, frozen=True):
    """Answers a `CacheCall`."""

    call: int
    explanations: list[Explanation] = []  # one for each request that is remembered
    cleared_blocks: int = 0
    pin: PinView | None = None  # the pin that was made
    why_not: str | None = None  # the reason why nothing was pinned or unpinned


NO_KV_CACHE = "insufficient_kv_cache"
"""The code of the error of a request that needed more memory than was lent."""


class RequestError(msgspec.Struct, tag="error", array_like=True, frozen=True):
    """Ends a request with an error; `status` is the HTTP status of its kind."""

    request_id: int
    status: int
    message: str
    code: str | None = None
    retry_after_s: float = 0.0  # 0: there is no use in sending it again


_PACKED_POSITIONS = 256
_pack = msgspec.msgpack.Encoder()
_unpack = msgspec.msgpack.Decoder(list[TokenLogprobs])


def pack_prompt_logprobs(entries: list[TokenLogprobs]) -> list[bytes]:
    """Pack the log-probabilities of a prompt's tokens 1, 2, … in parts, which can be decoded one at a time."""
    starts = range(0, len(entries), _PACKED_POSITIONS)
    return [_pack.encode(entries[start : start + _PACKED_POSITIONS]) for start in starts]


def unpack_prompt_logprobs(parts: list[bytes]) -> Iterator[TokenLogprobs]:
    """Yield what `pack_prompt_logprobs` packed."""
    for part in parts:
        yield from _unpack.decode(part)


ToEngine = AddRequest | Abort | CacheCall | Sleep | Wake | AttachStorage | DetachStorage | Shutdown
FromEngine = Ready | StepOutput | CacheReport | RequestError | Slept | Woken | StorageChanged
