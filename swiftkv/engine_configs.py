"""Compiles the YAML file and the plan into what each engine process is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from swiftkv.cache.geometry import lay_out
from swiftkv.cache.plan import LendingPair, ModelPlan, plan_lending
from swiftkv.config import Config
from swiftkv.engine.messages import EngineConfig
from swiftkv.lease.messages import LendingSpec, LinkGeometry, PeerSpec
from swiftkv.transport.topology import Topology, TransportChoice, node_transports, read_topology

_WITHOUT_WATCHDOG_S = 3600.0  # waits within a step have an end all the same


def engine_config(config: Config, plans: Sequence[ModelPlan], index: int, ipc: Path) -> EngineConfig:
    """All that the engine of model `index` is told. `ipc`: the directory of the node's sockets."""
    model, plan = config.models[index], plans[index]
    address = engine_addresses(plans, ipc)[plan.name]
    return EngineConfig(
        name=model.name,
        path=str(plan.checkpoint.directory),
        requests_address=f"{address}.requests",
        outputs_address=f"{address}.outputs",
        kv_bytes=plan.pool_bytes,
        device_part=None if plan.device_part is None else str(plan.device_part),
        enforce_eager=model.enforce_eager or model.tensor_parallel_size > 1,  # sums of ranks are not captured
        # On the CPU the host computes itself: there is nothing that it could plan beside.
        async_scheduling=model.device != "cpu" if model.async_scheduling is None else model.async_scheduling,
        max_model_len=plan.max_model_len,
        device=model.device,
        dtype=model.dtype,
        threads=max(1, model.threads // model.tensor_parallel_size),
        block_size=model.kv_cache.block_size,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        enable_prefix_caching=model.enable_prefix_caching,
        enable_chunked_prefill=model.enable_chunked_prefill,
        lending=lending_spec(config, plans, plan, ipc),
        tensor_parallel_size=model.tensor_parallel_size,
        ranks_directory=f"{ipc}/{index}.ranks",
        watchdog_s=config.node.watchdog or _WITHOUT_WATCHDOG_S,
    )


def engine_addresses(plans: Sequence[ModelPlan], ipc: Path) -> dict[str, str]:
    """By model; what follows the dot says which of an engine's sockets is meant."""
    return {plan.name: f"ipc://{ipc}/{i}" for i, plan in enumerate(plans)}


def lending_pairs(plans: Sequence[ModelPlan]) -> list[LendingPair]:
    """Those that any budget could use, in order of `plans`."""
    return [pair for room in plan_lending(plans) for pair in room.pairs if pair.can_lend]


def lending_transports(config: Config, plans: Sequence[ModelPlan]) -> dict[str, TransportChoice]:
    """How KV is lent, by whose memory it is in: see `node_transports`."""
    pairs = [(pair.worker.device, pair.master.device) for pair in lending_pairs(plans)]
    topology = machine() if any(device != "cpu" for pair in pairs for device in pair) else None
    return node_transports(config.node.lending.transport, pairs, topology)


@cache
def machine() -> Topology:
    return read_topology()


def lending_spec(config: Config, plans: Sequence[ModelPlan], plan: ModelPlan, ipc: Path) -> LendingSpec | None:
    """`plan`'s part in lending, None if it has none. Links are those that any budget could use, in order of `plans`.

    `ipc`: the directory of the node's sockets.
    """
    addresses = engine_addresses(plans, ipc)
    pairs = lending_pairs(plans)
    lends = [pair for pair in pairs if pair.worker is plan]
    borrows = [pair for pair in pairs if pair.master is plan]
    if not lends and not borrows:
        return None
    model = next(model for model in config.models if model.name == plan.name)
    return LendingSpec(
        leases_address=f"{addresses[plan.name]}.leases",
        lenders=_peers([(pair.worker, pair) for pair in borrows], addresses),
        borrowers=_peers([(pair.master, pair) for pair in lends], addresses),
        budget_bytes=plan.budget_bytes or 0,
        window_s=model.lending.window if model.lending else 0.0,
        policy=model.lending.policy if model.lending else "total",
        transport=lending_transports(config, plans)["GPUs" if plan.on_gpu else "the host"].kind,
        io_backend=config.node.lending.io_backend,
        stream_buffers=config.node.lending.stream_buffers,
        rendezvous=str(ipc),
        max_wait_s=config.node.lending.max_wait,
    )


def _peers(pairs: Sequence[tuple[ModelPlan, LendingPair]], addresses: Mapping[str, str]) -> list[PeerSpec]:
    links: dict[str, list[LinkGeometry]] = {}
    for peer, pair in pairs:
        links.setdefault(peer.name, []).append(link_geometry(pair))
    return [PeerSpec(name, f"{addresses[name]}.leases", of_peer) for name, of_peer in links.items()]


def link_geometry(pair: LendingPair) -> LinkGeometry:
    """Return what both ends of a link are told, so that they find the same bytes."""
    regions = lay_out([(group, pair.worker.num_blocks) for group in pair.worker.groups])
    return LinkGeometry(
        lender_group=pair.worker_group,
        borrower_group=pair.master_group,
        meu_w=pair.extent.meu_w,
        meu_m=pair.extent.meu_m,
        extent_bytes=pair.extent.num_bytes,
        num_extents=pair.pool_extents,
        lender_base_offset_bytes=regions[pair.worker_group].base_offset_bytes,
    )
