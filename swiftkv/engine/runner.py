"""The model runner: owns the weights and the pool of an engine, and runs the scheduler's steps."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from swiftkv._core import GroupSpec
from swiftkv.background import FOREGROUND, Background
from swiftkv.cache.cuda_pool import CudaPool, allocate_pool
from swiftkv.cache.division import PoolDivision, SharedExtents, divide
from swiftkv.cache.geometry import KVGroup, blocks_for_tokens
from swiftkv.cache.host_blocks import HostBlocks, HostChunks, HostSource, groups_to_copy
from swiftkv.cache.pool import Pool, SharedHostMemory
from swiftkv.engine.device import capture_graphs, capture_streaming, size_pool
from swiftkv.engine.expert_loads import ExpertLoads
from swiftkv.engine.memory import kv_bytes_on_host
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine.step import EngineStep
from swiftkv.errors import ConfigError, NoRoomError, TransferError
from swiftkv.kernels.host_copies import upload
from swiftkv.lease.messages import LinkGeometry
from swiftkv.master.layer_stream import LayerStream
from swiftkv.models.batch import Int32Array, ModelInput, fill_in_sampled
from swiftkv.models.decoder import Decoder
from swiftkv.models.loader import MappedWeights, load_decoder, read_description
from swiftkv.models.parallel import ALONE, Communicator, agree
from swiftkv.models.registry import read_config
from swiftkv.models.rope import table_digest
from swiftkv.policies import IoBackend
from swiftkv.progress import PROGRESS
from swiftkv.shared_memory import map_memory
from swiftkv.storage.host_medium import HostMedium
from swiftkv.tier.reach import Reach, reach_of
from swiftkv.transport.base import DevicePool, HostMemory, PeerHandle, SharedPool, Transport
from swiftkv.transport.fence import Fence
from swiftkv.transport.select import open_transport
from swiftkv.transport.topology import LINK_PROGRAMS, TransportKind
from swiftkv.units import PoolBytes

if TYPE_CHECKING:
    from swiftkv.engine.cuda_graphs import DecodeGraphs, DecodeInputs

_OUT_OF_MEMORY = re.compile("out of memory|_ALLOC_FAILED", re.IGNORECASE)


class ModelRunner:
    """Owns the weights and the pool; to be called in inference mode.

    Raises `ConfigError` or `CheckpointError` if the weights cannot be loaded or the pool cannot be allocated.
    """

    def __init__(
        self, config: EngineConfig, communicator: Communicator = ALONE, background: Background = FOREGROUND
    ) -> None:
        """Load the model, or this rank's part of it if `communicator` has several ranks, and allocate its pool."""
        self._config = config
        self._communicator = communicator
        description = read_description(Path(config.path))
        self._model_config = read_config(Path(config.path), config.task)
        self.vocab_size = self._model_config.vocab_size
        self.eos_token_ids = self._model_config.eos_token_ids
        groups = self._model_config.of_rank(communicator.size).kv_groups(config.block_size, config.dtype)
        division = divide(
            groups,
            max_num_seqs=config.max_num_seqs,
            enable_chunked_prefill=config.enable_chunked_prefill,
            shares_extents=config.shares_extents,
        )
        if isinstance(config.memory, PoolBytes):
            _check_room(config, division, config.memory.num_bytes)
        self.device = torch.device(config.device)
        _set_up(self.device)
        self.last_token_ids = torch.zeros(config.max_num_seqs, dtype=torch.int32, device=self.device)
        """The last token sampled for each slot. The sampler writes it on the stream of the steps."""
        # The files stay open, so that the engine wakes with the same weights.
        self._files = MappedWeights(Path(config.path), description)
        self._model = self.load_weights(background)
        self._model.ops.set_num_threads(config.threads)
        self.kernels = self._model.ops.name
        self.rounding = self._rounding(self._model.ops.rounding)
        """Names how this engine rounds keys and values. Engines that differ in it share no stored blocks."""
        self.expert_loads = self._count_experts()
        group_blocks = division.group_blocks(self._kv_bytes(division))
        self.num_blocks = division.sequence_blocks(group_blocks)
        host = _host_memory(config) if communicator.size == 1 else None
        self.pool = allocate_pool(
            list(zip(groups, group_blocks, strict=True)),
            self.device,
            name=config.name,
            shares_extents=isinstance(division, SharedExtents),
            host=host,
        )
        self._regions = [self.pool.attended_tensor(index) for index in range(len(groups))]
        self.decode_graphs = self._capture_graphs()
        self.host_source = None if host is None else _host_source(config, host, self.pool)
        """The host memory from which steps copy blocks; `None` if they copy none."""
        self.transport = _open_transport(config, self.pool, groups, self.host_source)
        """Copies between our pool and the pools of lenders, or host memory; `None` if there are neither."""
        self.group_specs = _group_specs(groups, self.pool, division, self.host_source)
        self.layer_stream = None if self.transport is None else LayerStream(self.transport, groups, communicator)
        self._capture_streaming()
        self.pool.fill_ahead()

    def _rounding(self, of_kernels: str) -> str:
        kind = "cpu" if self.device.type == "cpu" else f"cuda {torch.cuda.get_device_capability(self.device)}"
        tables = table_digest((each.rope, each.head_dim) for each in self._model_config.attention)
        return f"{of_kernels} on {kind}, {tables}"

    def _kv_bytes(self, division: PoolDivision) -> int:
        """Return the bytes of the pool. On a GPU, it is the smallest over all ranks of what weights and steps leave."""
        config = self._config
        if self.device.type != "cuda":
            return kv_bytes_on_host(config.memory)
        with _out_of_memory_is_no_room(self.device), torch.inference_mode():
            own_bytes = size_pool(config, self._model, division, self.device, self.vocab_size)
            kv_bytes = int(self._communicator.all_gather(torch.tensor([own_bytes], device=self.device)).min())
        _check_room(config, division, kv_bytes)
        return kv_bytes

    @property
    def other_ranks(self) -> Sequence[HostMemory]:
        """The pools of the other ranks, laid out like `pool`; empty unless this is rank 0 of several."""
        return ()

    def rank_pools(self) -> list[torch.Tensor]:
        """Return the pools of all ranks as uint8 `[pool bytes]`, mapped here, our own first.

        A block has the same offset in each of them.

        Raises `ConfigError` if the pool of another rank cannot be mapped.
        """
        return [self.pool.tensor]

    def reach_pools(self) -> Reach:
        """Return the object through which a tier reads and writes the pools of all ranks.

        Raises `ConfigError` if the pool of another rank cannot be mapped, or no memory can be locked.
        """
        return reach_of(self.rank_pools(), max(region.group.block_bytes for region in self.pool.regions))

    def attach_lender(self, link: int, pool: PeerHandle) -> None:
        """Attach a lender's pool as `link`, on all ranks; between steps only.

        Raises `TransferError` if any rank cannot attach it. Then call `detach_lender`.
        """
        failure = None
        try:
            self._attach(link, pool)
        except TransferError as error:
            failure = error
        agree(self._communicator, failure)

    def _attach(self, link: int, pool: PeerHandle) -> None:
        assert self.transport is not None
        self.transport.attach(link, self._parts_of(link, pool)[self._communicator.rank])

    def _parts_of(self, link: int, pool: PeerHandle) -> list[PeerHandle]:
        """Return, for each of our ranks, the handle of its part of the blocks that are borrowed over `link`."""
        geometry = _borrow_links(self._config)[link]
        part_bytes = geometry.meu_m * self.pool.regions[geometry.borrower_group].group.block_bytes
        size = self._communicator.size
        return [pool.of_rank(rank, size, part_bytes) for rank in range(size)]

    def detach_lender(self, link: int) -> None:
        """Detach a link on all ranks, if it is attached; between steps only."""
        assert self.transport is not None
        self.transport.detach(link)

    def lender_pools(self, link: int) -> list[npt.NDArray[np.uint8]] | None:
        """Return the lender's memory that holds the blocks borrowed over `link`: one uint8 array per rank, ours first.

        Offsets of blocks count from the first byte of each array. Return `None` if this process cannot read the memory
        in place.
        """
        own = None if self.transport is None else self.transport.lender_pool(link)
        return None if own is None else [own]

    def close(self) -> None:
        """Detach the lenders' pools; no step may follow."""
        if self.transport is not None:
            self.transport.close()

    def load_weights(self, background: Background) -> Decoder:
        """Load the model, in any thread; pass the result to `use`. Raises what the constructor raises.

        On the CPU, the load runs in the `background`. On a GPU it does not: the driver starts threads during the load,
        and these would keep the background's low priority for good.
        """
        num_threads = torch.get_num_threads()  # torch keeps it per thread; a new thread starts with one per core
        if self.device.type == "cuda":
            return self._load_weights(num_threads)
        return background.run(lambda: self._load_weights(num_threads))

    def _load_weights(self, num_threads: int) -> Decoder:
        torch.set_num_threads(num_threads)
        config = self._config
        PROGRESS.forget_weights()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        with _out_of_memory_is_no_room(self.device):
            model = load_decoder(
                self._model_config,
                self._files,
                getattr(torch, config.dtype),
                self.device,
                config.max_model_len,
                config.block_size,
                communicator=self._communicator,
            )
        self._files.check_unchanged()
        return model

    def check_files(self) -> None:
        """Raise `FilesChangedError` if a file was written to after it was loaded.

        Only the CPU needs the check, because only there the weights are views of the files.
        """
        if self.device.type == "cpu":
            self._files.check_unchanged()

    def files_identity(self) -> int:
        """Return the identity of the weights' files; see `MappedWeights.identity`."""
        return self._files.identity()

    def weights_fingerprint(self) -> str:
        """Return the fingerprint of the loaded weights, in any thread. Raises as `MappedWeights.fingerprint` does."""
        return self._files.fingerprint()

    def drop_weights(self) -> None:
        """Free the memory of the weights. Until `use` is called, steps may copy blocks, but compute no tokens."""
        assert self._communicator.size == 1
        self.decode_graphs = None
        self.expert_loads = ExpertLoads({})
        del self._model
        gc.collect()
        self._files.forget_all()
        PROGRESS.forget_weights()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch._C._cuda_clearCublasWorkspaces()  # allowed, because no graph refers to them any more
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL(None).malloc_trim(0)

    def use(self, model: Decoder) -> None:
        """Run `model`, which `load_weights` returned, from now on."""
        self._model = model
        self.expert_loads = self._count_experts()
        self.decode_graphs = self._capture_graphs()
        self._capture_streaming()

    def _count_experts(self) -> ExpertLoads:
        # Counts on a GPU are not reported: reading them would make the host wait for the device.
        return ExpertLoads({} if self.device.type == "cuda" else self._model.tokens_per_expert())

    def _capture_graphs(self) -> DecodeGraphs[DecodeInputs] | None:
        is_alone = self._communicator.size == 1  # the exchanges between ranks cannot be captured
        if self.device.type != "cuda" or self.kernels != "triton" or not is_alone:
            return None
        with _out_of_memory_is_no_room(self.device), torch.inference_mode():
            return capture_graphs(self._config, self._model, self._regions, self.last_token_ids)

    def _capture_streaming(self) -> None:
        if self.layer_stream is not None and self.transport is not None and self.decode_graphs is not None:
            with _out_of_memory_is_no_room(self.device), torch.inference_mode():
                capture_streaming(self._config, self.decode_graphs, self.layer_stream, self.transport)

    def forward(self, plan: EngineStep) -> torch.Tensor:
        """Compute a step, write its KV where the plan says, and return hidden states [T, hidden] of its tokens.

        On a GPU the step is only launched: the host waits for nothing, and may launch the next one at once.

        Raises `TransferError` if a copy failed. The step's results are then void, and none of its copies is in flight.
        """
        if plan.has_unknown_tokens and self._communicator.size > 1:  # only rank 0 samples
            self.last_token_ids.copy_(self._communicator.all_gather(self.last_token_ids)[0])
        self._move_blocks(plan.local_moves)
        if not len(plan.token_ids):
            if self.layer_stream is not None:
                self.layer_stream.run_copies_only(plan)
            # In a step with tokens, the ranks wait for each other's sums. This step needs a barrier instead: once it is
            # over, rank 0 may read or write the moved blocks in the pools of all ranks.
            self._communicator.all_gather(torch.zeros(1, device=self.device))
            return torch.empty(0, 0, device=self.device)
        if self.decode_graphs is not None:
            hidden = self.decode_graphs.run(plan)
            if hidden is not None:
                return hidden
        batch = ModelInput.from_plan(plan)
        batch = replace(batch, token_ids=upload(plan.token_ids, self.device))
        if plan.has_unknown_tokens:
            batch = replace(batch, token_ids=fill_in_sampled(batch.token_ids, self.last_token_ids))
        if self.layer_stream is None:
            return self._model.forward(batch, self._regions)
        with self.layer_stream.step(plan) as stream:
            return self._model.forward(batch, self._regions, stream)

    def _move_blocks(self, moves: Int32Array) -> None:
        """Copy whole blocks within the pool, in order: a block may move to the place of one that moved before.

        On a GPU the copies run on the stream of the steps: after the previous step, which may write to these blocks,
        and before the layers of this step.
        """
        for group, block, place in moves.tolist():
            blocks = self.pool.region_tensor(group)
            blocks[place].copy_(blocks[block])

    def fence(self) -> Fence:
        """Return a fence that marks the end of everything launched by the steps so far."""
        return Fence(self.device)

    def logits(self, hidden: torch.Tensor, rows: npt.NDArray[np.int32] | slice) -> torch.Tensor:
        """Return float32 [R, vocab] for the given rows of `hidden`."""
        if isinstance(rows, slice):
            return self._model.logits(hidden[rows])
        if not len(rows):
            return torch.empty(0, self.vocab_size, device=self.device)
        if len(rows) < len(hidden):  # otherwise `rows` names every row, in order
            hidden = hidden.index_select(0, upload(rows, self.device))
        return self._model.logits(hidden)


def _set_up(device: torch.device) -> None:
    if device.type != "cuda":
        return
    torch.cuda.set_device(device)
    # With reduced precision, a sum would lose digits and depend on how cuBLAS splits it.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _host_memory(config: EngineConfig) -> SharedHostMemory | None:
    """Return the host memory below an engine's pool, if there is any. Raises `OSError` if it cannot be mapped."""
    if config.storage is None or config.storage.host_fd is None:
        return None
    medium = HostMedium.of(config.storage.host_fd, config.storage.host_member)
    chunks = HostChunks(medium.chunks_offset_bytes, medium.chunk_bytes, medium.num_chunks)
    return SharedHostMemory(config.storage.host_fd, medium.memory.nbytes, chunks)


def _host_source(config: EngineConfig, host: SharedHostMemory, pool: Pool | CudaPool) -> HostSource | None:
    """Return the host memory from which steps can copy blocks of some groups, if there are such groups.

    Raises `OSError` if it cannot be mapped.
    """
    groups = groups_to_copy([region.group for region in pool.regions], host.chunks.chunk_bytes, pool.host_blocks)
    if not groups or not host.chunks.num_chunks or _transport_kind(config) == "p2p":
        return None
    memory = map_memory(host.fd, host.nbytes) if pool.host_memory is None else pool.host_memory
    return HostSource(memory, host.chunks, groups)


def _group_specs(
    groups: Sequence[KVGroup], pool: Pool | CudaPool, division: PoolDivision, source: HostSource | None
) -> list[GroupSpec]:
    host = pool.host_blocks or HostBlocks(group=-1, first=0, stride=1, count=0)

    def source_of(group: int) -> HostChunks:
        return HostChunks(0, 0, 0) if source is None or group not in source.groups else source.chunks

    return [
        GroupSpec(
            num_layers=group.num_layers,
            num_blocks=region.num_blocks,
            window=group.window,
            layer_block_bytes=group.layer_block_bytes,
            base_offset_bytes=region.base_offset_bytes,
            blocks_per_extent=division.blocks_per_extent(i),
            host_first=host.first if i == host.group else 0,
            host_stride=host.stride if i == host.group else 1,
            num_host_blocks=host.count if i == host.group else 0,
            source_offset_bytes=source_of(i).offset_bytes,
            num_source_chunks=source_of(i).num_chunks,
        )
        for i, (group, region) in enumerate(zip(groups, pool.regions, strict=True))
    ]


def _transport_kind(config: EngineConfig) -> TransportKind:
    """Return the transport that reaches lenders, if there are any, or else host memory."""
    if config.lending is not None and config.lending.lenders:
        return config.lending.transport
    return "peer" if torch.device(config.device).type == "cuda" else "shm"


def _io_backend(config: EngineConfig) -> IoBackend:
    """Return the way in which a GPU copies layers from lenders and host memory."""
    spec = config.storage if config.lending is None else config.lending
    return "kernel" if spec is None else spec.io_backend


def _open_transport(
    config: EngineConfig, pool: SharedPool | DevicePool, groups: Sequence[KVGroup], source: HostSource | None
) -> Transport | None:
    """Open the transport to lenders and to host memory, if there are any.

    Raises `ConfigError` if the device cannot read host memory.
    """
    spec = config.lending
    if source is None and (spec is None or not spec.lenders):
        return None
    transport = open_transport(
        _transport_kind(config),
        pool,
        io_backend=_io_backend(config),
        deadline_s=config.copy_deadline_s,
        max_programs=spec.max_programs if spec is not None else LINK_PROGRAMS,
        widths_bytes=sorted({group.layer_block_bytes for group in groups}),
    )
    if source is not None:
        try:
            transport.attach_host(len(_borrow_links(config)), source.memory)
        except TransferError as error:
            raise ConfigError(f"tiers.host: {error}; give it less memory") from error
    return transport


@contextmanager
def _out_of_memory_is_no_room(device: torch.device) -> Iterator[None]:
    """Turn a failed allocation into `NoRoomError`.

    Only torch's own allocator raises `OutOfMemoryError`. Other failures are recognized by their text.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.cuda.OutOfMemoryError) and not _OUT_OF_MEMORY.search(str(error)):
            raise
        reason = str(error).splitlines()[0]
        raise NoRoomError(f"device: {device} has no room for the weights and the largest step: {reason}") from error


def _check_room(config: EngineConfig, division: PoolDivision, kv_bytes: int) -> None:
    """Raise `ConfigError` unless a sequence of `max_model_len` fits in the pool and all that lenders could lend."""
    if _has_room(config, division, kv_bytes):
        return
    needed_bytes = division.pool_bytes_for_tokens(config.max_model_len)
    raise ConfigError(
        f"kv_cache.memory: one sequence of max_model_len {config.max_model_len} needs {needed_bytes} bytes, but the "
        f"pool has {kv_bytes}" + (", and lenders cannot lend the rest" if _borrow_links(config) else "")
    )


def _has_room(config: EngineConfig, division: PoolDivision, kv_bytes: int) -> bool:
    group_blocks = division.group_blocks(kv_bytes)
    borrowed = [0] * len(division.groups)
    for link in _borrow_links(config):
        borrowed[link.borrower_group] += link.num_extents * link.meu_m
    whole = blocks_for_tokens(config.max_model_len, config.block_size)
    if isinstance(division, SharedExtents):
        return min(group_blocks) > 0 and division.holds(whole, group_blocks, borrowed)
    for group, split in zip(division.groups, division.split(group_blocks, borrowed), strict=True):
        room = sum(split)
        if room < (group.blocks_to_run(config.max_model_len) if config.enable_chunked_prefill else whole):
            return False
    return True


def _borrow_links(config: EngineConfig) -> list[LinkGeometry]:
    return [link for peer in (config.lending.lenders if config.lending else []) for link in peer.links]
