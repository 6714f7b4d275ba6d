"""A model as the engine sees it, and the loop that most models share: layers that add to one array of hidden states.

Imports no torch, as every file of a model does: `swiftkv plan` reads models without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from swiftkv.cache.geometry import KVGroup
from swiftkv.errors import ConfigError
from swiftkv.kernels.attention_spec import AttentionSpec
from swiftkv.kernels.ops import AnyOps
from swiftkv.models.config import AttentionKind, DecoderConfig
from swiftkv.models.stream import NO_STREAM, KVStream
from swiftkv.models.weights import RankSlices, Weight
from swiftkv.progress import PROGRESS

if TYPE_CHECKING:
    from torch import Tensor

    from swiftkv.models.batch import ModelInput
    from swiftkv.models.loader import Packer
    from swiftkv.models.parallel import Ranks

_LAYERS_AT_ONCE = 4
"""The number of layers whose kernels are deferred together, in steps of at most `_FEW_TOKENS`.

In longer steps it is one layer, because the results of all deferred kernels take memory.
"""
_FEW_TOKENS = 128

Batches = Sequence[Sequence[Any]]
"""A step's attention as the kernels prepared it: for each layer-stream buffer, for each KV group."""


class Decoder(Protocol):
    """Weights and forward pass of one model, or of a rank's part of it, on one device."""

    def __init__(self, config: DecoderConfig, groups: tuple[KVGroup, ...], packer: Packer, ranks: Ranks) -> None:
        """Pack the weights, one matrix at a time; `config` and `groups` are of this rank's part.

        Raises `CheckpointError` for a tensor that is missing or of the wrong shape.
        """

    @staticmethod
    def read_config(architecture: str, directory: Path) -> DecoderConfig:
        """Read the shape of a model of `architecture` from its `config.json`. Raises as `registry.read_config` does."""

    @staticmethod
    def weights(config: DecoderConfig, part: RankSlices) -> dict[str, Weight]:
        """Return the tensors that a rank reads, by name; `config` is the whole model's."""

    @property
    def ops(self) -> AnyOps: ...

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The layers by attention kind, in the order of the pool, with this rank's KV heads."""

    @property
    def specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of each KV group."""

    def forward(self, batch: ModelInput, regions: Sequence[Tensor], stream: KVStream = NO_STREAM) -> Tensor:
        """Prepare `batch` and run the layers over it; see `run_layers`."""

    def prepare(self, batch: ModelInput) -> Batches:
        """Prepare each group's attention, once for each layer-stream buffer: each has a block table of its own."""

    def run_layers(
        self, token_ids: Tensor, batches: Batches, regions: Sequence[Tensor], stream: KVStream = NO_STREAM
    ) -> Tensor:
        """Return hidden states [T, hidden_size] before the final norm; writes the KV of the step's tokens.

        `token_ids` int32 [T] are on the model's device; the host does not look at them. `regions` are the KV groups'
        parts of the pool, uint8, flat. `stream` copies KV to and from other pools; its errors pass through.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 [R, vocab_size] for rows [R, hidden_size] of what `run_layers` returned.

        A model without a head returns the rows after its final norm, float32 [R, hidden_size].
        """

    def tokens_per_expert(self) -> dict[int, Tensor]:
        """Return how often each expert was chosen so far, int64 [num_experts], by layer. The kernels update these."""


@dataclass(frozen=True, slots=True)
class KVPlace:
    """The place of one layer's KV, and the attention that reads it there."""

    layer: int  # in the model
    group: int  # in the model's KV groups
    index: int  # in the group's layers
    spec: AttentionSpec


@dataclass(frozen=True, slots=True)
class StepKV:
    """The KV of one step: where it lies, and the stream that moves it."""

    batches: Batches
    regions: Sequence[Tensor]
    stream: KVStream

    def batch(self, place: KVPlace) -> Any:
        """Return the prepared attention of a layer; the layers of a group take the layer-stream buffers in turn."""
        return self.batches[place.index % len(self.batches)][place.group]


class AttentionPart(Protocol):
    """The first half of a layer."""

    def add_to(self, hidden: Tensor, kv: StepKV) -> None:
        """Add attention over the normalised `hidden` [T, hidden_size] to it; write and read the layer's KV."""

    @property
    def is_deferrable(self) -> bool:
        """Whether only kernels compute it, so that their calls may be deferred (`Ops.deferred`)."""


class MlpPart(Protocol):
    """The second half of a layer."""

    def add_to(self, hidden: Tensor) -> None:
        """Add the MLP of the normalised `hidden` [T, hidden_size] to it."""

    @property
    def is_deferrable(self) -> bool:
        """Whether only kernels compute it, so that their calls may be deferred (`Ops.deferred`)."""

    @property
    def tokens_per_expert(self) -> Tensor | None:
        """The number of times that each expert was chosen so far, int64 [num_experts]; `None` without experts."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Two parts that read the hidden states of the step's tokens and add to them, norms included."""

    attention: AttentionPart
    mlp: MlpPart


def attention_spec(group: KVGroup, kind: AttentionKind) -> AttentionSpec:
    """Return the attention of a kind's query heads to its KV group.

    Raises `ConfigError` for a group that no kernel can read yet.
    """
    if group.kind == "recurrent":
        raise ConfigError(f"layers {group.layers}: recurrent state is not supported, only keys and values are")
    return AttentionSpec(
        num_heads=kind.num_heads,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        block_size=group.block_size,
        scale=group.head_dim**-0.5 if kind.scale is None else kind.scale,
        window=group.window,
        soft_cap=kind.soft_cap,
        v_head_dim=group.v_head_dim,
    )


def kv_places(groups: Sequence[KVGroup], specs: Sequence[AttentionSpec]) -> list[KVPlace]:
    """Return the place of every layer of a model, in the order of its layers."""
    places = [
        KVPlace(layer, number, index, spec)
        for number, (group, spec) in enumerate(zip(groups, specs, strict=True))
        for index, layer in enumerate(group.layers)
    ]
    return sorted(places, key=lambda place: place.layer)


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Everything that the parts of one layer are packed from."""

    config: DecoderConfig
    place: KVPlace
    cos_sin: Tensor  # float32 [max_model_len, rotary_dim]
    packer: Packer
    ranks: Ranks

    @property
    def prefix(self) -> str:
        """The beginning of the names of the layer's tensors."""
        return f"model.layers.{self.place.layer}"

    @property
    def kind(self) -> AttentionKind:
        return self.config.attention[self.place.group]

    def norm(self, module: str) -> Tensor:
        """Pack the weights of one of the layer's norms."""
        return self.packer.norm(f"{self.prefix}.{module}.weight")


class LayeredDecoder(ABC):
    """The forward pass of an embedding, layers one after the other, a norm and a head.

    The class of a family reads its configuration, declares its weights, and packs a layer.
    """

    def __init__(self, config: DecoderConfig, groups: tuple[KVGroup, ...], packer: Packer, ranks: Ranks) -> None:
        self.ops = ranks.ops
        self.kv_groups = groups
        self.specs = tuple(map(attention_spec, groups, config.attention))
        self._config = config
        self._ranks = ranks
        self._device = packer.device
        cos_sin = [packer.cos_sin(kind.rope, kind.head_dim) for kind in config.attention]
        self._layers = tuple(
            self.layer(LayerSource(config, place, cos_sin[place.group], packer, ranks))
            for place in kv_places(groups, self.specs)
        )
        self._is_deferrable = all(layer.attention.is_deferrable and layer.mlp.is_deferrable for layer in self._layers)
        self._embedding = packer.tensor("model.embed_tokens.weight")  # [vocab_size, hidden_size]
        self._embedding_scale = packer.rounded(config.embedding_scale)
        self._final_norm = packer.norm("model.norm.weight")  # [hidden_size]
        self._lm_head = packer.head("lm_head", self._embedding) if config.has_head else None

    @staticmethod
    @abstractmethod
    def layer(source: LayerSource) -> Layer:
        """Pack one layer."""

    def forward(self, batch: ModelInput, regions: Sequence[Tensor], stream: KVStream = NO_STREAM) -> Tensor:
        return self.run_layers(batch.token_ids, self.prepare(batch), regions, stream)

    def prepare(self, batch: ModelInput) -> Batches:
        return [
            [
                self.ops.prepare_batch(
                    spec,
                    batch.positions,
                    batch.query_starts,
                    batch.context_lens,
                    table,
                    table_starts,
                    device=self._device,
                )
                for spec, table, table_starts in zip(self.specs, tables, batch.table_starts, strict=True)
            ]
            for tables in batch.stream_tables
        ]

    def run_layers(
        self, token_ids: Tensor, batches: Batches, regions: Sequence[Tensor], stream: KVStream = NO_STREAM
    ) -> Tensor:
        kv = StepKV(batches, regions, stream)
        hidden = self.ops.embed(token_ids, self._embedding)  # [T, hidden_size]
        if self._embedding_scale != 1:
            hidden *= self._embedding_scale
        defers = self._is_deferrable and stream is NO_STREAM
        at_once = _LAYERS_AT_ONCE if len(hidden) <= _FEW_TOKENS else 1
        for begin in range(0, len(self._layers), at_once):
            with self.ops.deferred() if defers else nullcontext():
                for layer in self._layers[begin : begin + at_once]:
                    layer.attention.add_to(hidden, kv)
                    layer.mlp.add_to(hidden)
                    PROGRESS.tick()
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.ops.rms_norm(hidden, self._final_norm, self._config.rms_norm_eps)
        if self._lm_head is None:
            return normed.float()
        logits, cap = self._ranks.logits(normed, self._lm_head), self._config.logit_soft_cap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def tokens_per_expert(self) -> dict[int, Tensor]:
        counts = enumerate(layer.mlp.tokens_per_expert for layer in self._layers)
        return {layer: tokens for layer, tokens in counts if tokens is not None}
