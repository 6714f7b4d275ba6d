"""The dense decoder: Qwen3, Qwen2, Llama and Mistral are one stack of layers that differ in what is present."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.dispatch import Ops, PackedLinear, select_ops
from swiftkv.models.batch import ModelInput
from swiftkv.models.config import DecoderConfig
from swiftkv.models.loader import MappedWeights
from swiftkv.models.parallel import ALONE, Communicator, RankSlices, parallel_ops
from swiftkv.models.rope import cos_sin_table
from swiftkv.models.stream import NO_STREAM, KVStream
from swiftkv.progress import PROGRESS


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer, packed for the kernels; sizes are those of a rank's part."""

    attention_norm: Tensor  # [hidden_size]
    qkv: PackedLinear  # hidden_size -> (num_heads + 2 * num_kv_heads) * head_dim
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    attention_out: PackedLinear  # num_heads * head_dim -> hidden_size
    mlp_norm: Tensor  # [hidden_size]
    gate_up: PackedLinear  # hidden_size -> 2 * intermediate_size
    down: PackedLinear  # intermediate_size -> hidden_size


class DenseDecoder:
    """Weights and forward pass of one model on one device."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: MappedWeights,
        dtype: torch.dtype,
        device: torch.device | str,
        max_model_len: int,
        block_size: int = 16,
        ops: Ops | None = None,
        communicator: Communicator = ALONE,
    ) -> None:
        """Pack `weights` one matrix at a time: at its peak this takes little more than the packed copy.

        With other ranks in `communicator`, it is this rank's part of them; `self.config` is the shape of that part.

        Raises `CheckpointError` for a tensor that is missing or of the wrong shape, `ConfigError` if `max_model_len`
        is more than the model can do.
        """
        config.check_max_model_len(max_model_len)
        whole, config = config, config.of_rank(communicator.size)
        self.config = config
        self.ops = parallel_ops(ops or select_ops(device), communicator, config.vocab_size)
        self.spec = AttentionSpec(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            block_size=block_size,
            scale=config.head_dim**-0.5,
        )
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len).to(device)
        part = RankSlices.of(whole, communicator.rank, communicator.size)
        packer = _Packer(whole, part, communicator.rank == 0, weights, dtype, torch.device(device), self.ops)
        self._layers = tuple(packer.layer(index) for index in range(config.num_layers))
        self._final_norm = packer.vector("model.norm.weight", config.hidden_size)
        self._embedding = packer.embedding()
        self._lm_head = packer.lm_head()

    @torch.inference_mode()
    def forward(self, batch: ModelInput, pool: Tensor, stream: KVStream = NO_STREAM) -> Tensor:
        """Hidden states [T, hidden_size] before the final norm; writes the KV of the batch's tokens.

        `pool` is the uint8 pool, flat; the model's only KV group begins at its first byte. `stream` brings and
        takes the KV that is not in there; what it raises passes through.
        """
        return self.run_layers(batch.token_ids, self.prepare(batch), pool, stream)

    def prepare(self, batch: ModelInput) -> tuple[Any, ...]:
        """What attention needs to know about the step, in the form that this model's kernels take: one for each
        layer-stream buffer, for its layers find their blocks through a table of their own."""
        return tuple(
            self.ops.prepare_batch(
                self.spec, batch.positions, batch.query_starts, batch.context_lens, tables[0], batch.table_starts[0]
            )
            for tables in batch.stream_tables
        )

    @torch.inference_mode()
    def run_layers(
        self, token_ids: Tensor, attention_batches: Sequence[Any], pool: Tensor, stream: KVStream = NO_STREAM
    ) -> Tensor:
        """`forward` from where the host has nothing left to decide; token_ids int32 [T], on the model's device."""
        ops, spec, eps = self.ops, self.spec, self.config.rms_norm_eps
        hidden = ops.embed(token_ids, self._embedding)  # [T, hidden_size]
        for index, layer in enumerate(self._layers):
            where = attention_batches[index % len(attention_batches)]
            qkv = ops.norm_linear(hidden, layer.attention_norm, eps, layer.qkv)
            stream.before_write(index)
            ops.rope_write_kv(qkv, self._cos_sin, layer.q_norm, layer.k_norm, eps, spec, where, pool, index)
            stream.after_write(index)
            attended = ops.attention(qkv, spec, where, pool, index)  # [T, num_heads * head_dim]
            stream.after_attention(index)
            ops.linear_residual(attended, layer.attention_out, hidden)
            activated = ops.norm_gate_up_silu(hidden, layer.mlp_norm, eps, layer.gate_up)  # [T, intermediate_size]
            ops.linear_residual(activated, layer.down, hidden)
            PROGRESS.tick()
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocab_size] for rows [R, hidden_size] of what `forward` returned."""
        normed = self.ops.rms_norm(hidden, self._final_norm, self.config.rms_norm_eps)
        return self.ops.logits(normed, self._lm_head)


@dataclass(frozen=True, slots=True)
class _Packer:
    """Knows the checkpoint's names, and turns a rank's part of its tensors into the kernels' form."""

    config: DecoderConfig  # of the whole model
    part: RankSlices
    is_first_rank: bool
    weights: MappedWeights
    dtype: torch.dtype
    device: torch.device
    ops: Ops

    def layer(self, index: int) -> Layer:
        config, part, prefix = self.config, self.part, f"model.layers.{index}"
        hidden, mlp = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention = f"{prefix}.self_attn"
        qk_norm = config.qk_norm
        return Layer(
            attention_norm=self.vector(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._by_rows(
                {
                    f"{attention}.q_proj": (q_size, part.q),
                    f"{attention}.k_proj": (kv_size, part.kv),
                    f"{attention}.v_proj": (kv_size, part.kv),
                },
                hidden,
                config.qkv_bias,
            ),
            q_norm=self.vector(f"{attention}.q_norm.weight", config.head_dim) if qk_norm else None,
            k_norm=self.vector(f"{attention}.k_norm.weight", config.head_dim) if qk_norm else None,
            attention_out=self._by_columns(f"{attention}.o_proj", (hidden, q_size), part.q, config.attention_out_bias),
            mlp_norm=self.vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._by_rows(
                {f"{prefix}.mlp.gate_proj": (mlp, part.mlp), f"{prefix}.mlp.up_proj": (mlp, part.mlp)},
                hidden,
                config.mlp_bias,
                interleave=True,
            ),
            down=self._by_columns(f"{prefix}.mlp.down_proj", (hidden, mlp), part.mlp, config.mlp_bias),
        )

    def embedding(self) -> Tensor:
        """[vocab_size, hidden_size]: the mapped file itself where dtype and device are the same."""
        return self._tensor("model.embed_tokens.weight", (self.config.vocab_size, self.config.hidden_size))

    def lm_head(self) -> PackedLinear:
        """Of this rank's part of the vocabulary; what that has behind the last token is zeros."""
        config, rows = self.config, self.part.vocab
        name = f"{'model.embed_tokens' if config.tie_word_embeddings else 'lm_head'}.weight"
        weight = self._tensor(name, (config.vocab_size, config.hidden_size), rows)
        missing = rows.stop - rows.start - len(weight)
        packed = self.ops.pack_linear([F.pad(weight, (0, 0, 0, missing)) if missing else weight], [None])
        self.weights.forget(name)
        return packed

    def vector(self, name: str, size: int) -> Tensor:
        """[size], a copy: a view would keep the file mapped."""
        return self._tensor(name, (size,)).clone()

    def _by_rows(
        self, modules: dict[str, tuple[int, slice]], in_features: int, bias: bool, interleave: bool = False
    ) -> PackedLinear:
        """Modules of the checkpoint, each with its output size and this rank's outputs, packed as one."""
        packed = self.ops.pack_linear(
            [self._tensor(f"{name}.weight", (size, in_features), rows) for name, (size, rows) in modules.items()],
            [self._tensor(f"{name}.bias", (size,), rows) if bias else None for name, (size, rows) in modules.items()],
            interleave,
        )
        for name in modules:
            self.weights.forget(f"{name}.weight")
        return packed

    def _by_columns(self, name: str, shape: tuple[int, int], columns: slice, bias: bool) -> PackedLinear:
        """One module with this rank's inputs. The sum over all ranks has the bias once."""
        weight = self._tensor(f"{name}.weight", shape, slice(None), columns)
        has_bias = bias and self.is_first_rank
        packed = self.ops.pack_linear([weight], [self._tensor(f"{name}.bias", shape[:1]) if has_bias else None])
        self.weights.forget(f"{name}.weight")
        return packed

    def _tensor(self, name: str, shape: tuple[int, ...], *part: slice) -> Tensor:
        """A part of tensor `name`, of which the file has `shape`: only that part is read."""
        return self.weights.get(name, shape)[part].to(device=self.device, dtype=self.dtype)
