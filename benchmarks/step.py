"""Measure the parts of a step beside the model: schedule, prepare, sample, commit, publish, with 64 running sequences.

The engine is the real one, with its scheduler, sampler and sockets; the model returns zeros at once. Prints the median
and the tenth and ninetieth percentile of microseconds per step. Target: all parts together under 150.

    python benchmarks/step.py --seqs 64 --context 2000
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import msgspec
import numpy as np
import torch
import zmq

from swiftkv._core import GroupSpec, StepPlan
from swiftkv.cache.geometry import KVGroup
from swiftkv.cache.pool import Pool
from swiftkv.engine.engine import Engine
from swiftkv.engine.expert_loads import ExpertLoads
from swiftkv.engine.messages import AddRequest, EngineConfig, SamplingParams
from swiftkv.models.batch import ModelInput
from swiftkv.transport.fence import Fence
from swiftkv.units import PoolBytes


class ZeroModel:
    """Prepares a step as the model runner does and computes nothing."""

    vocab_size = 320
    eos_token_ids = ()
    device = torch.device("cpu")
    kernels = "cpu"
    layer_stream = None
    host_source = None
    decode_graphs = None

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        group = KVGroup(layers=tuple(range(28)), num_kv_heads=1, head_dim=16, dtype="bfloat16", block_size=16)
        self.pool = Pool([(group, num_blocks)])
        self.group_specs = [GroupSpec(28, num_blocks, 0)]
        self.expert_loads = ExpertLoads({})
        self.last_token_ids = torch.zeros(max_num_seqs, dtype=torch.int32)

    def forward(self, plan: StepPlan) -> torch.Tensor:
        return ModelInput.from_plan(plan).token_ids

    def check_files(self) -> None:
        """Do nothing: there are no files."""

    def fence(self) -> Fence:
        return Fence(self.device)

    def logits(self, hidden: torch.Tensor, rows: Any) -> torch.Tensor:
        return torch.zeros(len(rows), self.vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()

    context = zmq.Context()
    to_engine, requests = _pair(context, "inproc://requests")
    outputs, from_engine = _pair(context, "inproc://outputs")
    max_model_len = args.context + args.steps + 64
    num_blocks = args.seqs * (max_model_len // 16 + 2)
    config = EngineConfig("bench", "", "", "", PoolBytes(0), max_model_len, max_num_seqs=args.seqs)
    model: Any = ZeroModel(num_blocks, args.seqs)
    engine = Engine(config, model, requests, outputs, context)
    rng = np.random.default_rng(0)
    for request_id in range(args.seqs):
        prompt = rng.integers(0, model.vocab_size, args.context).astype(np.int32)
        sampling = SamplingParams(max_tokens=args.steps + 32, temperature=0.0)
        to_engine.send(msgspec.msgpack.encode(AddRequest(request_id + 1, prompt.tobytes(), sampling)))
    engine._wait()
    for message in engine._receive():
        engine._handle(message)  # type: ignore[arg-type]
    costs_us: list[float] = []
    with torch.inference_mode():
        while len(costs_us) < args.steps:
            started_s = time.perf_counter()
            engine.step()
            costs_us.append((time.perf_counter() - started_s) * 1e6)
            while from_engine.poll(0):
                from_engine.recv()
    decode_us = sorted(costs_us[-args.steps // 2 :])  # the first half holds the prefills
    tenth = len(decode_us) // 10
    print(
        f"{args.seqs} sequences of {args.context:,} tokens: median {statistics.median(decode_us):.0f} us a step, "
        f"{decode_us[tenth]:.0f} to {decode_us[-tenth]:.0f} for the middle 80 %"
    )


def _pair(context: zmq.Context[Any], address: str) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    push, pull = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    for socket in (push, pull):
        socket.set_hwm(100_000)
    push.bind(address)
    pull.connect(address)
    return push, pull


if __name__ == "__main__":
    main()
