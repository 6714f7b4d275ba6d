"""The interface of the kernels. It defines what each function computes.

Models use `Ops` alone. `kernels.cpu`, `kernels.triton_ops` and `kernels.reference` each implement all of it.
Imports no torch, so that a model's file can be read without it.

Sizes in shapes: T tokens of a step, M rows, K inputs and N outputs of a linear layer. Activations are contiguous
tensors of the weights' dtype, where the kernels run.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from swiftkv.kernels.experts import SILU, GatedActivation, PackedExperts
from swiftkv.kernels.weight_codes import CodedMatrix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from swiftkv.kernels.attention_spec import AttentionSpec
    from swiftkv.kernels.experts import Choices, ExpertLayer, Router


class PackedLinear(Protocol):
    """Weights of a linear layer, in the form that one kind of kernels reads."""

    @property
    def out_features(self) -> int: ...
    @property
    def in_features(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


Packed = TypeVar("Packed", bound=PackedLinear)
Experts = TypeVar("Experts", bound=PackedExperts)
Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class PackedMlp(Generic[Packed]):
    """A gated MLP and the norm before it."""

    norm: Tensor  # [hidden_size]
    norm_eps: float
    gate_up: Packed  # hidden_size -> 2 * intermediate_size, interleaved
    down: Packed  # intermediate_size -> hidden_size
    activation: GatedActivation = SILU


class Ops(Protocol[Packed, Experts, Batch]):
    """One kind of kernels. Its packed weights and experts, and the `Batch` that it prepares, are opaque to others."""

    @property
    def name(self) -> str:
        """`cpu`, `triton` or `reference`."""

    @property
    def rounding(self) -> str:
        """Names how these kernels round on this machine. KV that other kernels wrote may differ in its last bits."""

    def set_num_threads(self, n: int, /) -> None:
        """Share the work of every function between `n` threads of the host, the calling one included."""

    def deferred(self) -> AbstractContextManager[None]:
        """Return a context inside which this thread's calls of other functions may be deferred until its end.

        Until then, results have no values, but may be passed to further calls. All other arguments must live until the
        end. Meanwhile nothing else may write what the calls read, or read or write what they write. If a call raises an
        error, the end of the context raises it, and later calls have no effect.
        """

    def keeps_codes(self, dtype: torch.dtype, /) -> bool:
        """Return whether quantized matrices of `dtype` stay codes in memory. Otherwise they are unpacked."""

    def pack_linear(
        self,
        weights: Sequence[Tensor | CodedMatrix],
        biases: Sequence[Tensor | None] | None = None,
        interleave: bool = False,
    ) -> Packed:
        """Pack weights [N_i, K] and biases [N_i] or None as one layer of sum(N_i) outputs.

        `interleave` is for (gate, up) of equal size: a gated MLP needs it, and no other layer may have it.
        """

    def linear(self, x: Tensor, w: Packed) -> Tensor:
        """Return x [M, K] @ w.T + bias, [M, N]."""

    def linear_residual(self, x: Tensor, w: Packed, residual: Tensor) -> None:
        """Add x [M, K] @ w.T + bias to `residual` [M, N] in place."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return x [M, K] / sqrt(mean(x^2) + eps) times weight [K].

        If `weight` has the dtype of `x`, quotient and product are both rounded to it, as in Llama. If only `weight` is
        float32, only the product is rounded, as in Gemma. The norms below round in the same way.
        """

    def rms_norm_residual(self, x: Tensor, weight: Tensor, eps: float, residual: Tensor) -> None:
        """Add rms_norm(x [M, K], weight [K], eps) to `residual` [M, K] in place; both norm and sum are rounded."""

    def norm_linear(self, x: Tensor, norm_weight: Tensor, eps: float, w: Packed) -> Tensor:
        """Return linear(rms_norm(x [M, K], norm_weight [K], eps), w), [M, N]."""

    def gated_mlp(self, x: Tensor, mlp: PackedMlp[Packed]) -> Tensor:
        """Return linear(a, down), [M, N], of the activation a of gate, up = norm_linear(x, norm, norm_eps, gate_up).

        The activation is computed in float32, and rounded to the dtype of x [M, K].
        """

    def add_gated_mlp(self, x: Tensor, mlp: PackedMlp[Packed]) -> None:
        """Add the gated MLP of x [M, K] to x in place, as `linear_residual` adds."""

    def logits(self, x: Tensor, w: Packed) -> Tensor:
        """Return x [M, K] @ w.T + bias in float32, [M, N]."""

    def route(self, logits: Tensor, router: Router, select_bias: Tensor | None = None) -> Choices:
        """Choose experts for each token by logits float32 [T, num_experts]; `select_bias` is float32 [num_experts]."""

    def pack_experts(self, layer: ExpertLayer) -> Experts:
        """Pack a layer's experts, one after the other, on the device of their weights."""

    def add_experts(self, x: Tensor, choices: Choices, experts: Experts, residual: Tensor) -> None:
        """Add the weighted sum of each token's experts to `residual` [T, hidden_size] in place.

        An expert returns down(activation(gate(x), up(x))) of x [T, hidden_size]. Adds the choices to
        `experts.tokens_per_expert`.
        """

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """Return rows of table [V, K] for token_ids int32 [T], [T, K]."""

    def prepare_batch(
        self,
        spec: AttentionSpec,
        positions: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        table_starts: Tensor,
        *,
        device: torch.device | str | None = None,
    ) -> Batch:
        """Prepare attention for a step, once for all layers of a KV group that use one block table.

        All int32, contiguous, on the host: positions [T], query_starts [S + 1], context_lens [S] with the new tokens
        counted, block_table: the sequences' entries one after the other, table_starts [S + 1]. An entry is the layer
        block of layer 0, or negative: `~entry` is the layer block of every layer. Entries that no query sees are not
        followed. `device` is where attention will run.
        """

    def rope_write_kv(
        self,
        qkv: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        spec: AttentionSpec,
        batch: Batch,
        pool: Tensor,
        layer: int,
    ) -> None:
        """Normalise and rotate q and k, and write k and v to the sequences' layer blocks; q changes in place.

        qkv [T, num_heads * head_dim + num_kv_heads * (head_dim + v_head_dim)]: q, k, v; cos_sin float32
        [max_len, rotary_dim]: cosines, then sines; q_norm and k_norm [head_dim] for a `rms_norm` of each head, or None.
        pool uint8, flat, from the KV group's first byte on; `layer` counts within the group.
        """

    def attention(
        self,
        qkv: Tensor,
        spec: AttentionSpec,
        batch: Batch,
        pool: Tensor,
        layer: int,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return causal attention of the step's queries over their sequences' KV, [T, num_heads * v_head_dim].

        Call after `rope_write_kv` of the same layer. Chunks of prompts and single tokens may be mixed. `sinks`
        [num_heads] are each head's score for one further key that every query sees and whose value is zero; they are
        neither scaled nor capped. Raises `ValueError` for anything that this kind of kernels does not support.
        """


AnyOps = Ops[Any, Any, Any]
"""Any kind of kernels, for code that only passes their packed weights, experts and batches on."""
