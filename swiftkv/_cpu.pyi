"""CPU kernels. Tensors are passed as addresses: callers check dtype, shape and contiguity."""

import enum
from collections.abc import Sequence

def isa() -> str:
    """The instruction set in use: avx2, avx512, avx512_bf16 or amx. SWIFTKV_CPU_ISA lowers it."""

def num_threads() -> int: ...
def set_num_threads(n: int) -> None: ...

class DType(enum.Enum):
    F32 = 0
    BF16 = 1
    F16 = 2

class Epilogue(enum.Enum):
    STORE = 0
    RESIDUAL = 1
    SILU_MUL = 2

class PackedLinear:
    def __init__(
        self, sources: Sequence[tuple[int, int, int]], in_features: int, dtype: DType, interleave: bool
    ) -> None:
        """`sources`: address of weights [rows, in_features], rows, address of float32 bias [rows] or 0."""
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
    eps: float,
    epilogue: Epilogue,
    out_dtype: DType,
    out: int,
) -> None: ...
def rms_norm(x: int, rows: int, k: int, weight: int, eps: float, dtype: DType, out: int) -> None: ...
def embed(ids: int, count: int, table: int, vocab_size: int, row_bytes: int, out: int) -> None: ...

class AttentionSpec:
    def __init__(
        self,
        dtype: DType,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int,
        scale: float,
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
    eps: float,
    qkv: int,
    pool: int,
    layer: int,
) -> None: ...
def attention(spec: AttentionSpec, batch: AttentionBatch, qkv: int, pool: int, layer: int, out: int) -> None: ...
