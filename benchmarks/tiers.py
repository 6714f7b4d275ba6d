"""Time turn 2 of a long conversation from every place that a block can lie in, and computed:

    python benchmarks/tiers.py --arch qwen3 --history 16384 --rounds 3 --out benchmarks/out/tiers.json
    python benchmarks/tiers.py --arch gemma3_text --layers 6

In each round one node computes a fresh conversation without any tier (*computing*) and continues it from its pool. Then
files, a Redis (--redis) and a Mooncake Store (--mooncake) are attached, one after the other: each gets the blocks of
the pool, the engine is killed and, once it is back with an empty pool, continues the conversation; with files once more
after the kernel was told to forget them (cold: `POSIX_FADV_DONTNEED`). A second node has host memory: its cache is
cleared, and then its engine is killed likewise, after which it has to verify the blocks. The pool of a third holds half
of the conversation, and a neighbour lends it memory for the rest.

Asked for: at most a quarter of the time of computing, and at most 1.1 of `max(pool, bytes / copy bandwidth)`, which is
the time from the pool, or of copying the bytes that were read. Two bandwidths are measured in each round: that of the
machine's memory, copied one layer's blocks at a time with one thread, as lending copies them; and that of each medium,
from which a plain program reads as many blocks of the same size (that of storage.py, with one thread).

Nodes that are not measured are held still. Every engine that was started anew waits until its pool has its memory
(about 1.5 s for each GiB; earlier loads would wait until the kernel has cleared it) and the host memory is mapped, and
computes --warmup fresh tokens, so that its weights are in memory.

Models are random ones of Qwen3-0.6B's width with --layers layers; with `gemma3_text` every second layer has full
attention, the others windows of 512 tokens. --checkpoint takes another model.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from copy_rate import copy_rate
from lending_node import (
    OUT,
    Node,
    Tokens,
    ask,
    model,
    nodes_up,
    only,
    parser,
    say,
    table,
    tiny_checkpoint,
    write_report,
)
from storage import Case, Plain, PlainMooncake, PlainRedis, measure

from swiftkv.admin_key import find_admin_key
from swiftkv.checkpoint import read_texts, save, standard_library_files, train_tokenizer
from swiftkv.planning.models import SizedPlan
from swiftkv.tier.load_choice import num_needed

NAME = "small"
_POLL_S = 0.05
_SETTLED_S = 0.5
_TIMEOUT_S = 300.0
_RESTARTS = {"restart": {"limit": 1000, "window": "1s", "backoff": "100ms"}}
_COMPUTING = "computing it"
_POOL = "the pool"
_WARM_FILES, _COLD_FILES = "files, page cache warm", "files, cold"
_REDIS, _MOONCAKE = "Redis", "a Mooncake Store"


@dataclass
class Figures:
    """Seconds to the first token from each place, and bytes per second of copying, in every round."""

    first_token_s: dict[str, list[float]] = field(default_factory=dict)
    copy_bytes_per_s: list[float] = field(default_factory=list)
    medium_bytes_per_s: dict[str, list[float]] = field(default_factory=dict)
    """The rates at which a plain program reads the media that are slower than memory."""
    peer_tokens: list[float] = field(default_factory=list)

    def note(self, place: str, seconds: float) -> None:
        self.first_token_s.setdefault(place, []).append(seconds)
        say(f"  {place}: {1000 * seconds:.0f} ms")

    def bounds_s(self, place: str, num_bytes: int) -> list[float]:
        """Return the time from the pool, or of reading the bytes from a place's medium, in every round."""
        rates = self.medium_bytes_per_s.get(place, self.copy_bytes_per_s)
        return [max(pool, num_bytes / rate) for pool, rate in zip(self.first_token_s[_POOL], rates, strict=True)]


def metric(node: Node, name: str) -> float:
    for line in httpx.get(f"{node.url}/metrics", timeout=60).text.splitlines():
        if line.startswith(f"{name}{{") and f'model_name="{NAME}"' in line:
            return float(line.rsplit(" ", 1)[1])
    return 0.0


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _TIMEOUT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise SystemExit(f"timed out while waiting for {what}")
        time.sleep(_POLL_S)


def engine_view(node: Node) -> dict[str, object]:
    view: dict[str, object] = httpx.get(f"{node.url}/ready", timeout=60).json()["engines"][NAME]
    return view


def restart_engine(node: Node) -> None:
    """Kill the node's engine, and return when the next one serves."""
    restarts = engine_view(node)["restarts"]
    node.engine(NAME).send_signal(signal.SIGKILL)
    wait_until("the engine to end", lambda: engine_view(node)["restarts"] != restarts)
    wait_until("the engine to serve again", lambda: engine_view(node)["state"] == "ready")
    engine, plan = node.engine(NAME).pid, node.plan(NAME)
    assert isinstance(plan, SizedPlan)
    wait_until("the pool to have its memory", lambda: shared_memory_bytes(engine) >= plan.pool_bytes)
    mapped_bytes = -1
    while (now_bytes := shared_memory_bytes(engine)) != mapped_bytes:  # host memory is mapped, too
        mapped_bytes = now_bytes
        time.sleep(_SETTLED_S)


def shared_memory_bytes(process: int) -> int:
    """Return the bytes of shared memory, without files, that a process has touched."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) << 10
    return 0


def change_storage(node: Node, storage: dict[str, Any] | None) -> None:
    """Detach the attached storage, and attach `storage`, if any."""
    headers = {"Authorization": f"Bearer {find_admin_key(node.url)}"}
    url = f"{node.url}/admin/storage/{NAME}"
    if engine_view(node)["storage_backend"] is not None:
        httpx.post(f"{url}/detach", headers=headers, timeout=300).raise_for_status()
    if storage is not None:
        httpx.post(f"{url}/attach", headers=headers, json=storage, timeout=300).raise_for_status()


def clear_cache(node: Node) -> None:
    """Have the engine forget its pool, and what it has pinned in host memory."""
    headers = {"Authorization": f"Bearer {find_admin_key(node.url)}"}
    httpx.post(f"{node.url}/admin/cache/{NAME}/clear", headers=headers, timeout=60).raise_for_status()


def forget_pages(directory: Path) -> None:
    """Have the kernel drop the files from its page cache."""
    os.sync()
    for file in directory.rglob("objects/*/*"):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def ttft_s(node: Node, prompt: list[int], num_tokens: int = 8) -> float:
    return float(asyncio.run(ask(node.target(NAME), prompt, num_tokens)).ttft_s)


def wait_until_written(node: Node, num_tokens: int) -> None:
    """Wait until the blocks of `num_tokens` tokens, and all others on offer, are stored."""
    num_blocks = num_tokens // node.plan(NAME).block_size
    wait_until("blocks to be written", lambda: metric(node, "swiftkv:tier_stored_blocks_total") >= num_blocks)
    wait_until("all of them to be written", lambda: metric(node, "swiftkv:tier_blocks_to_store") == 0)


class Conversation:
    """A history, the answer to it, and new turns that are all different.

    Each turn computes 25 tokens, wherever the others come from: its own 24, and the last of the answer, which is the
    only one whose KV was not computed. The blocks before it are full, and therefore cached.
    """

    def __init__(self, node: Node, tokens: Tokens, length: int) -> None:
        """Have a node compute the history."""
        self.length = length
        self._tokens = tokens
        history = tokens.fresh(length)
        block_size = node.plan(NAME).block_size
        answer = asyncio.run(ask(node.target(NAME), history, 2 * block_size - length % block_size + 1))
        self.computing_s = float(answer.ttft_s)
        self._past = [*history, *answer.token_ids]

    def turn(self) -> list[int]:
        return [*self._past, *self._tokens.fresh(24)]

    def continue_after_restart(self, node: Node, warmup: int, before: Callable[[], None] = lambda: None) -> float:
        """Kill the engine, and return the seconds to the first token of a turn that must come from below the pool."""
        restart_engine(node)
        ttft_s(node, self._tokens.fresh(warmup))
        before()
        seconds = ttft_s(node, self.turn())
        wait_until("its report", lambda: metric(node, "swiftkv:tier_hit_tokens_total") > 0)
        assert metric(node, "swiftkv:tier_hit_tokens_total") >= self.length
        return seconds


def measure_storage(
    node: Node, backends: dict[str, dict[str, Any]], tokens: Tokens, figures: Figures, args: Namespace
) -> None:
    """Measure computing, the pool, and then one backend after the other."""
    change_storage(node, None)
    ttft_s(node, tokens.fresh(args.warmup))
    conversation = Conversation(node, tokens, args.history)
    figures.note(_COMPUTING, conversation.computing_s)
    figures.note(_POOL, ttft_s(node, conversation.turn()))
    for name, backend in backends.items():
        change_storage(node, {**backend, "prefetch_policy": "wait_complete"})
        wait_until_written(node, args.history)
        if name != "files":
            figures.note(name, conversation.continue_after_restart(node, args.warmup))
            continue
        figures.note(_WARM_FILES, conversation.continue_after_restart(node, args.warmup))
        cold_s = conversation.continue_after_restart(node, args.warmup, lambda: forget_pages(Path(backend["path"])))  # noqa: B023
        figures.note(_COLD_FILES, cold_s)


def measure_media(
    backends: dict[str, dict[str, Any]], directory: Path, block_bytes: int, num_bytes: int, figures: Figures
) -> None:
    """Measure the rates at which a plain program reads blocks from the media of these backends."""
    case = Case(block_bytes, num_bytes // block_bytes, time.perf_counter)
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=directory) as parent:
        files = Plain(Path(parent) / "plain")
        _, rates[_WARM_FILES], rates[_COLD_FILES] = measure(files, case, 1, files.directory)
    if _REDIS in backends:
        _, rates[_REDIS] = measure(PlainRedis(backends[_REDIS]["url"], 1), case, 1, None)
    if _MOONCAKE in backends:
        store = PlainMooncake(backends[_MOONCAKE]["master_server_address"])
        store.register(case.memory)
        _, rates[_MOONCAKE] = measure(store, case, 1, None)
        store.client.close()
    for place, rate in rates.items():
        figures.medium_bytes_per_s.setdefault(place, []).append(rate)


def measure_host(node: Node, tokens: Tokens, figures: Figures, args: Namespace) -> None:
    ttft_s(node, tokens.fresh(args.warmup))
    conversation = Conversation(node, tokens, args.history)
    wait_until("the blocks to be written", lambda: metric(node, "swiftkv:tier_blocks_to_store") == 0)
    clear_cache(node)
    figures.note("host memory", ttft_s(node, conversation.turn()))
    figures.note("host memory, after a restart", conversation.continue_after_restart(node, args.warmup))


def measure_peer(node: Node, tokens: Tokens, figures: Figures, args: Namespace) -> None:
    ttft_s(node, tokens.fresh(args.warmup))
    conversation = Conversation(node, tokens, args.history)
    before = node.stream_seconds_at_rest(NAME).peer_hit_tokens
    figures.note("a peer's pool", ttft_s(node, conversation.turn()))
    figures.peer_tokens.append(node.stream_seconds_at_rest(NAME).peer_hit_tokens - before)


def make_model(arch: str, num_layers: int) -> Path:
    """Return a random model of Qwen3-0.6B's width and `num_layers` layers, made once."""
    directory = OUT / "checkpoints" / f"{arch}-{num_layers}-layers"
    if (directory / "tokenizer.json").exists():  # written last
        return directory
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = train_tokenizer(read_texts(standard_library_files()[:10]), 512)
    windows: dict[str, Any] = {}
    if arch == "gemma3_text":
        kinds = ["sliding_attention", "full_attention"]
        windows = {"sliding_window": 512, "query_pre_attn_scalar": 128, "layer_types": kinds * (num_layers // 2)}
    config = AutoConfig.for_model(
        arch,
        hidden_size=1024,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        intermediate_size=3072,
        max_position_embeddings=40960,
        vocab_size=len(tokenizer),
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
        **windows,
    )
    torch.manual_seed(0)
    save(AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(torch.bfloat16), tokenizer, directory)
    return directory


def bytes_read(node: Node, num_tokens: int) -> int:
    """Return the bytes of KV that a prefix of `num_tokens` needs; layers with windows need only their tails."""
    groups = node.plan(NAME).groups
    return sum(num_needed(group, 0, num_tokens // group.block_size) * group.block_bytes for group in groups)


def main() -> None:
    options = parser(__doc__, rounds=3, default_model="a random model of --arch and --layers")
    options.add_argument("--arch", default="qwen3", choices=["qwen3", "gemma3_text"])
    options.add_argument("--layers", type=int, default=4)
    options.add_argument("--history", type=int, default=16384, help="tokens of turn 1")
    options.add_argument("--warmup", type=int, default=512, help="fresh tokens that are computed after each start")
    options.add_argument("--memory", default="1GiB", help="size of each pool, except that of the borrower")
    options.add_argument("--host", default="2GiB", help="size of the host memory")
    options.add_argument("--storage", type=Path, help="directory for the files; default: a temporary one")
    options.add_argument(
        "--redis", metavar="URL", help="URL of a Redis server with a bound on its memory; default: measure none"
    )
    options.add_argument(
        "--mooncake",
        metavar="HOST:PORT",
        help="address of the master of a Mooncake Store that has memory; default: measure none",
    )
    args = options.parse_args()
    checkpoint = args.checkpoint or make_model(args.arch, args.layers)
    shape = {"max_model_len": args.history + 1024, "max_num_seqs": 4}
    figures = Figures()
    with tempfile.TemporaryDirectory(dir=args.storage, prefix="tier-") as temporary:
        files = str(Path(temporary) / "kv")
        backends: dict[str, dict[str, Any]] = {"files": {"backend": "file", "path": files, "size": "16GiB"}}
        if args.redis:
            backends[_REDIS] = {"backend": "redis", "url": args.redis, "timeout": "10s"}
        if args.mooncake:
            backends[_MOONCAKE] = {"backend": "mooncake", "master_server_address": args.mooncake}
        stored = Node("storage", _RESTARTS, [model(NAME, checkpoint, args.memory, **shape)])
        host = {"host": {"size": args.host}}
        hosted = Node("host", _RESTARTS, [model(NAME, checkpoint, args.memory, tiers=host, **shape)])
        num_bytes = bytes_read(stored, args.history)
        lender = model("lender", tiny_checkpoint(), 2 * num_bytes, threads=1, lending={"budget": "100%"})
        borrower = model(NAME, checkpoint, num_bytes, "master", **shape)
        lent = Node("peer", {}, [borrower, lender])
        tokens = Tokens(args.seed, (300, stored.plan(NAME).vocab_size))
        nodes = (stored, hosted, lent)
        with nodes_up(*nodes):
            lent.wait_until_borrowed(NAME, lent.promised_bytes(NAME))
            for node in nodes:
                node.hold()
            for number in range(args.rounds):
                say(f"round {number + 1}")
                group = stored.plan(NAME).groups[0]
                figures.copy_bytes_per_s.append(copy_rate(group, num_bytes // group.block_bytes)[0])
                measure_media(backends, Path(temporary), group.block_bytes, num_bytes, figures)
                with only(stored, nodes):
                    measure_storage(stored, backends, tokens, figures, args)
                with only(hosted, nodes):
                    measure_host(hosted, tokens, figures, args)
                with only(lent, nodes):
                    measure_peer(lent, tokens, figures, args)
    report(figures, num_bytes, args)
    write_report(args, num_bytes=num_bytes, figures=vars(figures))


def report(figures: Figures, num_bytes: int, args: Namespace) -> None:
    rows = []
    for place, values in figures.first_token_s.items():
        others = (
            figures.first_token_s[_COMPUTING],
            figures.bounds_s(_POOL, num_bytes),  # the pool's medium is memory
            figures.bounds_s(place, num_bytes),
        )
        ratios = [[value / other for value, other in zip(values, times, strict=True)] for times in others]
        rows.append(
            [place, f"{1000 * statistics.median(values):.0f}", *(f"{statistics.median(r):.2f}" for r in ratios)]
        )
    heads = ["of computing", "of max(pool, bytes / copying)", "of max(pool, bytes / reading the medium)"]
    say(table(["turn 2 from", "first token, ms", *heads], rows))
    rate = statistics.median(figures.copy_bytes_per_s)
    say(
        f"\n{num_bytes / 1e6:.0f} MB are read; copying moves {rate / 1e9:.1f} GB/s, so they take "
        f"{1000 * num_bytes / rate:.0f} ms. With the peer lay {statistics.median(figures.peer_tokens):.0f} of "
        f"{args.history} tokens."
    )


if __name__ == "__main__":
    main()
