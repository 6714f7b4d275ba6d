"""Time a whole model on one GPU beside the machine's floors and transformers, and the cost of streaming lent KV.

PYTHONPATH=. python benchmarks/gpu/serve.py [--out serve.json] [--only model|transformers|lending|decoding]

A dense decoder of Qwen3-8B's shape with random weights, made on the device; nothing is downloaded.

model: a decode step of 32 sequences of 4,096 tokens (a CUDA graph, with logits and greedy tokens), and the prefill of
one prompt. Floors: the bytes of weights and KV over the bandwidth of a copy, or the operations over the rate of a bf16
matrix product; both are measured in the same run. transformers: the same shape and steps, sdpa, static cache.

lending: prompts whose beginning lies in lent memory and streams through the pool layer by layer while 512 new tokens
are computed; beside them the same prompts with that KV in pinned host memory, loaded by the same code with the same
overlap. The lender's memory is another allocation on the same GPU, as a mapping of its pool is; prompts have 4K to 32K
tokens. Time to first token is that of the step, without HTTP; `tests/gpu/test_gpu_node.py` has the real processes.

decoding: steps of 8 sequences of 1,024 tokens that stream most of their KV, eagerly and as a CUDA graph, beside the
same steps with all of it in the pool.

All parts are in one file because they measure one model, which is made once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

sys.path.insert(0, str(Path(__file__).parent))

from machine import Machine, measure, median_seconds, print_table, write_json

from swiftkv.cache.geometry import KVGroup, split_pool
from swiftkv.models.config import DecoderConfig
from swiftkv.models.decoder import Decoder
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.quantization import QWeights
from swiftkv.models.registry import read_config
from swiftkv.models.stream import NO_STREAM

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
}
BLOCK_SIZE = 64
DECODE = (32, 4096)
PREFILLS = (2048, 8192, 32_768)
CACHED = range(4096, 32_768 + 1, 2048)
NEW_TOKENS = 512
STREAMED_DECODE = (8, 6, 10)  # sequences; blocks of each in the pool, and borrowed
CAPPED_BLOCKS = 96  # blocks of the borrower's own pool in the lending part: 6,144 tokens
REPEATS = 8

Int32Array = npt.NDArray[np.int32]


class RandomWeights(MappedWeights):
    """A checkpoint whose random tensors are made on request."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        return torch.randn(shape, dtype=self._dtype, device=self._device) / math.sqrt(shape[-1])

    def quantized(self, name: str, shape: tuple[int, ...], num_shards: int, qweights: QWeights | None) -> None:
        """Nothing is quantized."""

    def has(self, name: str) -> bool:
        """Nothing lies in a file, so nothing is to be forgotten."""
        return False


def make_decoder(shape: dict[str, Any], device: torch.device, dtype: torch.dtype, max_len: int) -> Decoder:
    return load_decoder(make_config(shape), RandomWeights(device, dtype), dtype, device, max_len, BLOCK_SIZE)


def make_config(shape: dict[str, Any]) -> DecoderConfig:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(shape))
        return read_config(Path(directory))


def matrix_parameters(config: DecoderConfig) -> int:
    """Count the parameters of the layers' matrices, which multiply every token."""
    heads = sum(
        len(kind.layers) * (kind.head_dim + kind.value_head_dim) * (kind.num_heads + kind.num_kv_heads)
        for kind in config.attention
    )
    return config.hidden_size * (heads + 3 * config.num_layers * config.intermediate_size)


def decode_bytes(config: DecoderConfig, batch: int, context: int) -> int:
    """Count the bytes that a decode step must read: the layers' matrices and the head's, and all KV; 2 bytes each."""
    kv_bytes = batch * context * sum(group.bytes_per_token for group in config.kv_groups(BLOCK_SIZE, "bfloat16"))
    return 2 * (matrix_parameters(config) + config.vocab_size * config.hidden_size) + kv_bytes


def prefill_operations(config: DecoderConfig, num_new: int, num_cached: int = 0) -> int:
    """Count multiplications and additions of layers, attention (without the masked half) and one row of logits.

    The model must have no windows.
    """
    pairs = num_new * num_cached + num_new * (num_new + 1) // 2
    attention = (
        2
        * pairs
        * sum(len(kind.layers) * (kind.head_dim + kind.value_head_dim) * kind.num_heads for kind in config.attention)
    )
    return 2 * matrix_parameters(config) * num_new + attention + 2 * config.vocab_size * config.hidden_size


def longest_context(own_blocks: int, lent_blocks: int, num_layers: int) -> int:
    """Return the tokens that one sequence may have, with `lent_blocks` borrowed (the paper's Eqs. 4 and 5)."""
    return BLOCK_SIZE * sum(split_pool(own_blocks * num_layers, [lent_blocks], num_layers))


def percentile(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(np.array(values), percent, method="higher"))


@dataclass(frozen=True, slots=True)
class Step:
    """An `EngineStep` of sequences whose tables are given."""

    token_ids: Int32Array
    positions: Int32Array
    query_starts: Int32Array
    context_lens: Int32Array
    stream_tables: Sequence[Sequence[Int32Array]]
    table_starts: Sequence[Int32Array]
    loads: Sequence[npt.NDArray[np.int64]] = field(default=())  # by buffer
    has_unknown_tokens: bool = False

    @property
    def num_stream_buffers(self) -> int:
        return len(self.loads)

    @property
    def has_copies(self) -> bool:
        return len(self.loads) > 0

    @property
    def local_moves(self) -> Int32Array:
        return np.empty((0, 3), np.int32)

    def copies(self, group: int, kind: str, buffer: int) -> npt.NDArray[np.int64]:
        return self.loads[buffer] if kind == "load" and self.loads else np.empty((0, 5), np.int64)


def local_step(num_layers: int, lengths: Sequence[tuple[int, int]], seed: int = 0) -> Step:
    """Return a step of sequences of (cached, new) tokens, all of whose blocks lie in the pool, at random."""
    context_lens = np.array([cached + new for cached, new in lengths], np.int32)
    counts = -(-context_lens // BLOCK_SIZE)
    blocks = np.random.default_rng(seed).permutation(int(counts.sum())).astype(np.int32)
    new = np.array([n for _, n in lengths])
    return Step(
        np.zeros(int(new.sum()), np.int32),
        np.concatenate([np.arange(cached, cached + n, dtype=np.int32) for cached, n in lengths]),
        np.append(0, new.cumsum()).astype(np.int32),
        context_lens,
        [[blocks * np.int32(num_layers)]],
        [np.append(0, counts.cumsum()).astype(np.int32)],
    )


def streamed_step(group: KVGroup, num_cached: int, num_new: int, num_buffers: int) -> Step:
    """Return a step of one sequence, whose cached blocks are borrowed on link 0 in runs of 8.

    Its new blocks are the pool's first; the places of the stream buffers come after them.
    """
    num_layers, width, block = group.num_layers, group.layer_block_bytes, group.block_bytes
    borrowed, own = num_cached // BLOCK_SIZE, -(-num_new // BLOCK_SIZE)
    first_slot = own * num_layers
    starts = np.arange(0, borrowed, 8)
    places = np.random.default_rng(num_cached).permutation(len(starts)) * 8
    tables, loads = [], []
    for buffer in range(num_buffers):
        slots = first_slot + buffer * borrowed + np.arange(borrowed)
        tables.append([np.concatenate((~slots, np.arange(own) * num_layers)).astype(np.int32)])
        counts = np.minimum(8, borrowed - starts)
        columns = (0 * starts, places * block, (slots[0] + starts) * width, counts, 0 * starts + 1)
        loads.append(np.ascontiguousarray(np.stack(columns, axis=1), np.int64))
    return Step(
        np.zeros(num_new, np.int32),
        np.arange(num_cached, num_cached + num_new, dtype=np.int32),
        np.array([0, num_new], np.int32),
        np.array([num_cached + num_new], np.int32),
        tables,
        [np.array([0, borrowed + own], np.int32)],
        loads,
    )


def streamed_decode(group: KVGroup, num_seqs: int, own: int, borrowed: int, num_buffers: int) -> Step:
    """Return a step of one token for each of `num_seqs` sequences.

    Each has `borrowed` blocks as a run on link 0, and `own` blocks in our pool, after which come the places of the
    stream buffers. Without buffers, all blocks are in our pool.
    """
    num_layers, width, block = group.num_layers, group.layer_block_bytes, group.block_bytes
    num_local = own if num_buffers else own + borrowed
    local = np.arange(num_seqs * num_local).reshape(num_seqs, -1) * num_layers
    tables, loads = [local.ravel().astype(np.int32)], []
    for buffer in range(num_buffers):
        first_slot = num_seqs * own * num_layers + buffer * num_seqs * borrowed
        slots = first_slot + np.arange(num_seqs * borrowed).reshape(num_seqs, -1)
        tables[buffer:] = [np.concatenate((~slots, local), axis=1).ravel().astype(np.int32)]
        places = np.arange(num_seqs) * borrowed * block
        columns = (0 * places, places, slots[:, 0] * width, 0 * places + borrowed, 0 * places + 1)
        loads.append(np.ascontiguousarray(np.stack(columns, axis=1), np.int64))
    context = (own + borrowed) * BLOCK_SIZE
    return Step(
        np.zeros(num_seqs, np.int32),
        np.full(num_seqs, context - 1, np.int32),
        np.arange(num_seqs + 1, dtype=np.int32),
        np.full(num_seqs, context, np.int32),
        [[table] for table in tables],
        [np.arange(num_seqs + 1, dtype=np.int32) * np.int32(own + borrowed)],
        loads,
    )


def forward(decoder: Decoder, pool: torch.Tensor, step: Step, stream: Any = NO_STREAM) -> torch.Tensor:
    from swiftkv.models.batch import ModelInput

    return decoder.forward(ModelInput.from_plan(step), [pool], stream)


def bench_model(machine: Machine, device: torch.device) -> Iterator[dict[str, object]]:
    from swiftkv.engine.cuda_graphs import DecodeGraphs, DecoderSteps

    decoder = make_decoder(SHAPE, device, torch.bfloat16, SHAPE["max_position_embeddings"])
    config = make_config(SHAPE)
    (group,) = decoder.kv_groups
    batch, context = DECODE
    num_blocks = max(batch * context, max(PREFILLS)) // BLOCK_SIZE
    pool = torch.zeros(num_blocks * group.block_bytes, dtype=torch.uint8, device=device)
    pool.view(torch.bfloat16).normal_()
    graphs = DecodeGraphs(DecoderSteps(decoder, [pool], torch.zeros(1, dtype=torch.int32, device=device)), device)
    graphs.capture([batch], 1 << 33)
    decode = local_step(group.num_layers, [(context - 1, 1)] * batch)

    def decode_once(_: int) -> None:
        hidden = graphs.run(decode)
        assert hidden is not None
        decoder.logits(hidden).argmax(-1)

    floor_s = decode_bytes(config, batch, context) / machine.copy_bytes_per_s
    yield _row(f"decode {batch} x {context}", median_seconds(decode_once), floor_s)
    for num_new in PREFILLS:
        step = local_step(group.num_layers, [(0, num_new)])

        def prefill_once(_: int, step: Step = step) -> None:
            decoder.logits(forward(decoder, pool, step)[-1:])

        floor_s = prefill_operations(config, num_new) / machine.matrix_flops_per_s
        yield _row(f"prefill {num_new}", median_seconds(prefill_once, repeats=8), floor_s)


def bench_transformers(machine: Machine, device: torch.device) -> Iterator[dict[str, object]]:
    calls = transformers_calls(SHAPE, device, torch.bfloat16, DECODE, PREFILLS)
    for name, (call, floor) in calls.items():
        rate = machine.copy_bytes_per_s if name.startswith("decode") else machine.matrix_flops_per_s

        def call_once(_: int, call: Callable[[], torch.Tensor] = call) -> None:
            with torch.inference_mode():
                call()

        yield _row(f"transformers: {name}", median_seconds(call_once, repeats=8), floor / rate)


def transformers_calls(
    shape: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    decode: tuple[int, int],
    prefills: Sequence[int],
) -> dict[str, tuple[Callable[[], torch.Tensor], int]]:
    """Return the same steps in transformers, with the bytes (decode) or operations (prefill) that give their floor."""
    from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

    values = {key: value for key, value in shape.items() if key != "model_type"}
    config = AutoConfig.for_model(shape["model_type"], **values)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    decoder = make_config(shape)
    batch, context = decode
    cache = StaticCache(config=config, max_cache_len=context)
    one = torch.zeros((batch, 1), dtype=torch.long, device=device)
    mask = torch.ones((batch, context), dtype=torch.long, device=device)
    last = torch.full((batch, 1), context - 1, device=device)

    def decode_once() -> torch.Tensor:
        logits: torch.Tensor = model(
            one, attention_mask=mask, position_ids=last, cache_position=last[0], past_key_values=cache
        ).logits
        return logits

    calls: dict[str, tuple[Callable[[], torch.Tensor], int]] = {
        f"decode {batch} x {context}": (decode_once, decode_bytes(decoder, batch, context))
    }
    for num_new in prefills:
        prompt = torch.zeros((1, num_new), dtype=torch.long, device=device)

        def prefill_once(prompt: torch.Tensor = prompt) -> torch.Tensor:
            logits: torch.Tensor = model(prompt, use_cache=True, logits_to_keep=1).logits
            return logits

        calls[f"prefill {num_new}"] = (prefill_once, prefill_operations(decoder, num_new))
    return calls


def bench_lending(_: Machine, device: torch.device) -> Iterator[dict[str, object]]:
    decoder = make_decoder(SHAPE, device, torch.bfloat16, SHAPE["max_position_embeddings"])
    (group,) = decoder.kv_groups
    most = max(CACHED) // BLOCK_SIZE
    own = CAPPED_BLOCKS * group.num_layers  # layer blocks
    assert -(-NEW_TOKENS // BLOCK_SIZE) * group.num_layers + 2 * most <= own, "two buffers do not fit"
    longest = longest_context(CAPPED_BLOCKS, most, group.num_layers)
    print(f"{CAPPED_BLOCKS * BLOCK_SIZE:,} tokens of pool, {most * BLOCK_SIZE:,} lent: {longest:,} in one sequence")
    for where, io_backend in (("lent", "kernel"), ("lent", "direct"), ("pinned host", "direct")):
        num_bytes = most * group.block_bytes
        theirs = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) if where == "pinned host" else None
        peer = torch.zeros(num_bytes, dtype=torch.uint8, device=device) if theirs is None else theirs
        yield stream_from(decoder, group, device, peer, io_backend, f"{where}, {io_backend}")


def stream_from(
    decoder: Decoder, group: KVGroup, device: torch.device, peer: torch.Tensor, io_backend: Any, name: str
) -> dict[str, object]:
    """Measure steps over prompts of every length: their time, and the part in which computing waited for copies."""
    from swiftkv.cache.cuda_pool import CudaPool
    from swiftkv.master.layer_stream import LayerStream
    from swiftkv.transport.peer import PeerTransport
    from swiftkv.transport.topology import ONE_GPU_PROGRAMS

    pool = CudaPool([(group, CAPPED_BLOCKS)], device)
    transport = PeerTransport(pool, io_backend, max_programs=ONE_GPU_PROGRAMS)
    # An IPC handle would map the peer's pool at such an address; the device can also read pinned host memory.
    transport.mappings.add(0, peer.data_ptr(), peer.numel())
    streams = LayerStream(transport, [group])
    first_token_s: list[float] = []
    for repeat in range(REPEATS + 1):
        for num_cached in CACHED:
            step = streamed_step(group, num_cached, NEW_TOKENS, 2)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            with streams.step(step) as stream:
                hidden = forward(decoder, pool.tensor, step, stream)
            decoder.logits(hidden[-1:]).argmax(-1)
            end.record()
            end.synchronize()
            streams.step_ended()
            if repeat:
                first_token_s.append(begin.elapsed_time(end) / 1e3)
            else:
                streams.recent.clear()  # kernels were compiled
    exposed_s = [step.exposed_s for step in streams.recent]
    del transport, streams, pool
    return {
        "case": name,
        "exposed_mean_s": float(np.mean(exposed_s)),
        "exposed_p99_s": percentile(exposed_s, 99),
        "first_token_p50_s": percentile(first_token_s, 50),
        "first_token_p99_s": percentile(first_token_s, 99),
    }


def bench_decoding(_: Machine, device: torch.device) -> Iterator[dict[str, object]]:
    from swiftkv.cache.cuda_pool import CudaPool
    from swiftkv.engine.cuda_graphs import DecodeGraphs, DecoderSteps
    from swiftkv.master.graph_stream import GraphStream
    from swiftkv.master.layer_stream import LayerStream
    from swiftkv.transport.peer import PeerTransport
    from swiftkv.transport.topology import ONE_GPU_PROGRAMS

    decoder = make_decoder(SHAPE, device, torch.bfloat16, SHAPE["max_position_embeddings"])
    (group,) = decoder.kv_groups
    num_seqs, own, borrowed = STREAMED_DECODE
    pool = CudaPool([(group, num_seqs * (own + borrowed))], device)
    peer = torch.zeros(num_seqs * borrowed * group.block_bytes, dtype=torch.uint8, device=device)
    transport = PeerTransport(pool, max_programs=ONE_GPU_PROGRAMS)
    transport.mappings.add(0, peer.data_ptr(), peer.numel())
    streams = LayerStream(transport, [group])
    graphs = DecodeGraphs(
        DecoderSteps(decoder, [pool.tensor], torch.zeros(1, dtype=torch.int32, device=device)), device
    )
    graphs.capture([num_seqs], 1 << 33)
    for num_buffers in (1, 2):
        stream = GraphStream(streams, transport.mappings, num_buffers, max_programs=ONE_GPU_PROGRAMS)
        graphs.capture([num_seqs], 1 << 33, stream)

    def eager(step: Step) -> torch.Tensor:
        with streams.step(step) as stream:
            return forward(decoder, pool.tensor, step, stream)

    for num_buffers in range(3):
        step = streamed_decode(group, num_seqs, own, borrowed, num_buffers)
        for how, run in (("eager", eager), ("CUDA graph", graphs.run)):
            hits = graphs.hits_total

            def run_once(_: int, run: Callable[[Step], object] = run, step: Step = step) -> None:
                run(step)

            seconds = median_seconds(run_once, repeats=20, warmups=3)
            streams.recent.clear()
            for _step in range(23 if step.has_copies else 0):  # `median_seconds` has waited for them
                streams.step_ended()
            exposed_s = [timings.exposed_s for timings in streams.recent][3:] or [0.0]
            yield {
                "case": f"decode {num_seqs} x {(own + borrowed) * BLOCK_SIZE}, {num_buffers} buffers, {how}",
                "s": seconds,
                "exposed_p50_s": float(np.median(exposed_s)),
                "graph_hits": graphs.hits_total - hits,
            }


def _row(case: str, seconds: float, floor_s: float) -> dict[str, object]:
    return {"case": case, "s": seconds, "floor_s": floor_s, "times_floor": seconds / floor_s}


def print_rows(rows: Sequence[dict[str, object]]) -> None:
    header = list(rows[0])
    print_table(header, [[f"{v:.4g}" if isinstance(v, float) else v for v in row.values()] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write every figure here, as JSON")
    parser.add_argument(
        "--only", choices=["model", "transformers", "lending", "decoding"], help="measure only this part"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: there is nothing to measure")
    device = torch.device("cuda", torch.cuda.current_device())
    machine = measure()
    print(machine.report(), flush=True)
    parts: dict[str, Callable[[Machine, torch.device], Iterator[dict[str, object]]]] = {
        "model": bench_model,
        "lending": bench_lending,
        "decoding": bench_decoding,
        "transformers": bench_transformers,  # last, so that nothing is lost if its installed version fails
    }
    results: list[dict[str, object]] = []
    for name, part in parts.items():
        if arguments.only in (None, name):
            rows: list[dict[str, object]] = []
            try:
                # transformers caches KV in tensors that it made outside of inference mode.
                with nullcontext() if name == "transformers" else torch.inference_mode():
                    rows.extend(part(machine, device))
            finally:  # what was measured before a failure
                if rows:
                    print_rows(rows)
                results += rows
                write_json(arguments.out, machine, results)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
