"""CPU kernels. Tensors are passed as addresses: callers check dtype, shape and contiguity."""

import enum
from collections.abc import Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

def amx_is_emulated() -> bool:
    """Return whether tiles are computed by other instructions, bit by bit as AMX does, for tests."""

def isa() -> str:
    """Return the instruction set in use: avx2, avx512, avx512_bf16 or amx. SWIFTKV_CPU_ISA chooses another."""

def supported_isa() -> str:
    """Return the last of the sets listed at `isa` that the CPU has, which may not be the fastest."""

def num_threads() -> int: ...
def set_num_threads(n: int) -> None: ...
def begin_deferral() -> None:
    """Have the kernels that this thread calls wait. Raises `RuntimeError` if they wait already."""

def run_deferred() -> None:
    """Run the kernels that wait, in the order of their calls. What they refer to must be alive."""

def end_deferral() -> None:
    """Drop the kernels that wait, and have none wait any more."""

def forbid_tokens(
    logits: int, num_rows: int, vocab_size: int, rows: npt.NDArray[np.int32], bits: npt.NDArray[np.uint32]
) -> None: ...

class DType(enum.Enum):
    F32 = 0
    BF16 = 1
    F16 = 2

class Epilogue(enum.Enum):
    STORE = 0
    RESIDUAL = 1

class CodeKind(enum.Enum):
    FOUR_BITS = 0
    INT8 = 1
    FP8 = 2

class NormWeight(enum.Enum):
    SAME_DTYPE = 0
    FLOAT32 = 1

class GatedActivation:
    """The activation of `kernels.experts.GatedActivation`."""

    def __init__(self, alpha: float, cubic: float, limit: float, up_offset: float) -> None: ...

class PackedLinear:
    @overload
    def __init__(
        self, sources: Sequence[tuple[int, int, int]], in_features: int, dtype: DType, interleave: bool
    ) -> None:
        """`sources`: address of weights [rows, in_features], rows, address of float32 bias [rows] or 0."""
    @overload
    def __init__(
        self,
        sources: Sequence[tuple[int, int, int, int, int]],
        kind: CodeKind,
        values: Sequence[float],
        group_size: int,
        in_features: int,
        dtype: DType,
        interleave: bool,
    ) -> None:
        """`sources`: addresses of codes, factors, and zeros or 0 (`CodedMatrix`); rows; address of bias or 0.

        Codes of four bits have `values`, others none.
        """
    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def interleaved(self) -> bool: ...
    @property
    def nbytes(self) -> int: ...

def linear(
    weights: PackedLinear,
    x: int,
    rows: int,
    norm_weight: int,
    norm_kind: NormWeight,
    eps: float,
    epilogue: Epilogue,
    out_dtype: DType,
    out: int,
) -> None: ...
def gated_mlp(
    gate_up: PackedLinear,
    down: PackedLinear,
    x: int,
    rows: int,
    norm_weight: int,
    norm_kind: NormWeight,
    eps: float,
    gated: GatedActivation,
    epilogue: Epilogue,
    out: int,
) -> None: ...
def rms_norm(x: int, rows: int, k: int, weight: int, kind: NormWeight, eps: float, dtype: DType, out: int) -> None: ...
def rms_norm_residual(
    x: int, rows: int, k: int, weight: int, kind: NormWeight, eps: float, dtype: DType, residual: int
) -> None: ...
def embed(ids: int, count: int, table: int, vocab_size: int, row_bytes: int, out: int) -> None: ...

class Score(enum.Enum):
    SOFTMAX = 0
    SOFTMAX_OF_CHOSEN = 1
    SIGMOID = 2

class Router:
    def __init__(
        self,
        num_experts: int,
        top_k: int,
        score: Score,
        num_groups: int,
        top_groups: int,
        renormalise: bool,
        scale: float,
    ) -> None: ...

def route(router: Router, logits: int, num_tokens: int, select_bias: int, experts: int, weights: int) -> None: ...

class PackedExperts:
    def __init__(self, hidden_size: int, inner_size: int, dtype: DType, gated: GatedActivation) -> None: ...
    def append(self, gate_up: PackedLinear, down: PackedLinear) -> None:
        """Append one expert; `gate_up` is interleaved. Raises `ValueError` for another shape or dtype."""
    def __len__(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

def add_experts(
    experts: PackedExperts,
    x: int,
    chosen: int,
    weights: int,
    num_tokens: int,
    top_k: int,
    tokens_per_expert: int,
    residual: int,
) -> None:
    """Add the chosen experts' outputs. Raises `IndexError`, having done nothing, for an expert that does not exist."""

class AttentionSpec:
    def __init__(
        self,
        dtype: DType,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        block_size: int,
        window: int,
        scale: float,
        soft_cap: float,
    ) -> None:
        """Raises `ValueError` for shapes that the kernels do not take."""

class AttentionBatch:
    def __init__(
        self,
        positions: int,
        query_starts: int,
        context_lens: int,
        block_table: int,
        table_starts: int,
        num_seqs: int,
    ) -> None: ...

def rope_write_kv(
    spec: AttentionSpec,
    batch: AttentionBatch,
    cos_sin: int,
    rotary_dim: int,
    q_norm: int,
    k_norm: int,
    norm_weight: NormWeight,
    eps: float,
    qkv: int,
    pool: int,
    layer: int,
) -> None: ...
def attention(
    spec: AttentionSpec, batch: AttentionBatch, qkv: int, pool: int, layer: int, sinks: int, out: int
) -> None:
    """Write attention to `out`; `sinks` is the address of float32 [num_heads], or 0."""

SHARE_TABLE_BYTES: int
SHARE_ACCOUNTS: int
TURN_NS: int
LEAD_NS: int
CREDIT_NS: int
ABSENT_NS: int
ASK_CONTENDED_NS: int
ASK_ALONE_NS: int
LONGEST_WAIT_NS: int

class Shares:
    """The accounts of engines that share cores, in its own table and by the caller's clock: see `shares.h`."""

    def __init__(self, num_cores: int) -> None: ...
    def open(
        self,
        account: int,
        threads: int,
        weight: float,
        max_share: float,
        is_whole: bool = False,
        unasked_ns: int = 0,
    ) -> None:
        """Open the account of an engine; if `is_whole`, it computes on all of its threads at once or on none.

        It computes for up to `unasked_ns` before it asks again, so its debt may be as large.

        Raises `ValueError` for a share that makes no sense.
        """
    def begin(self, account: int, now_ns: int) -> None: ...
    def end(self, account: int) -> None: ...
    def charge(self, account: int, core_ns: int) -> None: ...
    def ask(self, account: int, now_ns: int) -> tuple[int, int]:
        """Return on how many cores the engine may compute, and if on none, after how many nanoseconds to ask again."""
    def forgive(self, account: int) -> int:
        """Let the engine compute for a turn, and return on how many cores."""
    def clock_ns(self, account: int) -> float: ...

class Turns:
    """The part of this process's engine in the table behind `fd`; its kernels wait for their turns from now on."""

    def __init__(
        self, fd: int, account: int, threads: int, weight: float, max_share: float, num_cores: int, num_ranks: int
    ) -> None:
        """Raises `ValueError` for a share that makes no sense."""
    def begin(self) -> None: ...
    def end(self) -> None: ...
    def check(self) -> None: ...
    @property
    def core_s(self) -> float: ...
    @property
    def waited_s(self) -> float: ...

class DeviceTurns:
    """The part of this process's engine in the table of one GPU, behind `fd`."""

    def __init__(self, fd: int, account: int, weight: float, max_share: float) -> None:
        """Raises `ValueError` for a share that makes no sense."""
    def wait(self) -> None:
        """Wait until it is the engine's turn to launch a step."""
    def charge(self, device_ns: int) -> None:
        """Charge the engine for a step that has ended."""
    def rest(self) -> None:
        """Note that the engine has no step to launch."""
    def is_contended(self) -> bool:
        """Return whether another engine wants the GPU, or this one may not have all of it."""
    @property
    def device_s(self) -> float: ...
    @property
    def waited_s(self) -> float: ...
