"""Compiles the YAML file and the plan into the configuration of each engine process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from swiftkv.cache.division import SharedExtents
from swiftkv.cache.geometry import lay_out
from swiftkv.config import Config
from swiftkv.engine.messages import EngineConfig, KVEventsSpec, PromptLookup
from swiftkv.lease.messages import LendingSpec, LinkGeometry, PeerSpec
from swiftkv.model_config import LendingConfig, ModelConfig
from swiftkv.planning.lending import LendingPair, lending_pairs
from swiftkv.planning.models import ModelPlan
from swiftkv.tier.messages import TierSpec, tier_spec
from swiftkv.transport.topology import TransportChoice

_WITHOUT_WATCHDOG_S = 3600.0  # waits within a step still end


def compile_engines(
    config: Config,
    plans: Sequence[ModelPlan],
    transports: Mapping[str, TransportChoice],
    ipc: Path,
    numbers: Mapping[str, int],
) -> tuple[EngineConfig, ...]:
    """Return the configurations of the engines, in order of `plans`.

    `transports` come from `planning.transports.lending_transports`. `ipc` is the directory of the node's sockets, in
    whose names `numbers` tell models apart.
    """
    addresses = {plan.name: f"ipc://{ipc}/{numbers[plan.name]}" for plan in plans}
    pairs = lending_pairs(plans)
    return tuple(
        _engine_config(
            config,
            model,
            plan,
            address=addresses[plan.name],
            ranks_directory=f"{ipc}/{numbers[plan.name]}.ranks",
            lending=_lending_spec(
                config, model, plan, pairs=pairs, addresses=addresses, transports=transports, ipc=ipc
            ),
        )
        for model, plan in zip(config.models, plans, strict=True)
    )


def _engine_config(
    config: Config,
    model: ModelConfig,
    plan: ModelPlan,
    *,
    address: str,
    ranks_directory: str,
    lending: LendingSpec | None,
) -> EngineConfig:
    """Return the configuration of one engine; each of its sockets has `address` with a suffix of its own."""
    return EngineConfig(
        name=model.name,
        log_level=config.node.log_level,
        path=str(plan.checkpoint.directory),
        requests_address=f"{address}.requests",
        outputs_address=f"{address}.outputs",
        memory=plan.memory,
        task=model.task,
        # Sums of ranks are not captured, and pooled requests have no decodes.
        enforce_eager=model.enforce_eager or model.tensor_parallel_size > 1 or model.task != "generate",
        async_scheduling=model.plans_ahead,
        max_model_len=plan.max_model_len,
        device=model.device,
        dtype=model.dtype,
        threads=max(1, model.threads // model.tensor_parallel_size),
        block_size=model.kv_cache.block_size,
        retention_interval=model.kv_cache.retention_interval,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        scheduling_policy=model.scheduling_policy,
        target_ttft_s=model.due_s,
        target_tpot_s=model.step_limit_s,
        long_prefill_token_threshold=model.long_prefill_token_threshold,
        max_num_partial_prefills=model.max_num_partial_prefills,
        max_long_partial_prefills=model.max_long_partial_prefills,
        prompt_lookup=_prompt_lookup(model),
        enable_prefix_caching=model.enable_prefix_caching,
        max_pinned_share=model.kv_cache.max_pinned,
        enable_chunked_prefill=model.enable_chunked_prefill,
        shares_extents=plan.shares_extents,
        lending=lending,
        storage=_tier_spec(config, model),
        kv_events=_kv_events_spec(model),
        tensor_parallel_size=model.tensor_parallel_size,
        ranks_directory=ranks_directory,
        watchdog_s=config.node.watchdog or _WITHOUT_WATCHDOG_S,
    )


def _tier_spec(config: Config, model: ModelConfig) -> TierSpec | None:
    storage = config.storage_of(model)
    if storage is not None:
        return tier_spec(storage, config.directory, config.node.lending.io_backend)
    if config.host_of(model) is not None:
        return TierSpec(None, str(config.directory), io_backend=config.node.lending.io_backend)
    return None


def _prompt_lookup(model: ModelConfig) -> PromptLookup | None:
    drafts = model.speculative_config
    return None if drafts is None else PromptLookup(**drafts.model_dump(exclude={"method"}))


def _kv_events_spec(model: ModelConfig) -> KVEventsSpec | None:
    events = model.kv_events_config
    if not events.enable_kv_cache_events:
        return None
    return KVEventsSpec(
        endpoint=events.endpoint,
        replay_endpoint=events.replay_endpoint,
        buffer_steps=events.buffer_steps,
        hwm=events.hwm,
        max_queue_size=events.max_queue_size,
        topic=events.topic,
        encoding=events.encoding,
    )


def _lending_spec(
    config: Config,
    model: ModelConfig,
    plan: ModelPlan,
    *,
    pairs: Sequence[LendingPair],
    addresses: Mapping[str, str],
    transports: Mapping[str, TransportChoice],
    ipc: Path,
) -> LendingSpec | None:
    """Return the part that the model of `plan` has in lending over `pairs`, `None` if it has none."""
    lends = [pair for pair in pairs if pair.lender is plan]
    borrows = [pair for pair in pairs if pair.borrower is plan]
    if not lends and not borrows:
        return None
    lending = model.lending or LendingConfig()
    transport = transports["GPUs" if plan.on_gpu else "the host"]
    return LendingSpec(
        leases_address=_leases_address(addresses[plan.name]),
        lenders=_peers(((pair.lender, pair) for pair in borrows), addresses),
        borrowers=_peers(((pair.borrower, pair) for pair in lends), addresses),
        budget_bytes=plan.budget_bytes or 0,
        window_s=lending.window,
        policy=lending.policy,
        transport=transport.kind,
        io_backend=config.node.lending.io_backend,
        max_programs=config.node.lending.max_programs or transport.max_programs,
        stream_buffers=config.node.lending.stream_buffers,
        rendezvous=str(ipc),
        max_wait_s=config.node.lending.max_wait,
        retry_after_s=_longest_window_s(config, borrows),
    )


def _longest_window_s(config: Config, borrows: Sequence[LendingPair]) -> float:
    """Return the longest window of the lenders in `borrows`, for which a lender offers nothing after a recall."""
    windows_s = {model.name: (model.lending or LendingConfig()).window for model in config.models}
    return max((windows_s[pair.lender.name] for pair in borrows), default=0.0)


def _peers(pairs: Iterable[tuple[ModelPlan, LendingPair]], addresses: Mapping[str, str]) -> list[PeerSpec]:
    links: dict[str, list[LinkGeometry]] = {}
    for peer, pair in pairs:
        links.setdefault(peer.name, []).append(link_geometry(pair))
    return [PeerSpec(name, _leases_address(addresses[name]), of_peer) for name, of_peer in links.items()]


def _leases_address(address: str) -> str:
    return f"{address}.leases"


def why_not_lend(config: Config, plan: ModelPlan, lending: LendingSpec | None) -> str | None:
    """Return why a model cannot lend, to complete "model 'x' …"; `None` if it can. `lending` is its engine's spec."""
    if not config.node.lending.enabled:
        return "lends and borrows nothing: node.lending is off"
    if plan.role == "master":
        return "is a master: it borrows and does not lend"
    if plan.budget_bytes is None:
        return "was started without a lending.budget; write one, even 0, and it can be changed while the model runs"
    if lending is None:
        return "has no master to lend to, or its pool is smaller than one extent: see swiftkv plan"
    return None


def link_geometry(pair: LendingPair) -> LinkGeometry:
    """Return the geometry that both ends of a link get, so that they find the same bytes."""
    plan = pair.lender
    shares_extents = isinstance(plan.division, SharedExtents)
    regions = lay_out(list(zip(plan.groups, plan.group_blocks, strict=True)), shares_extents)
    return LinkGeometry(
        lender_group=pair.lender_group,
        borrower_group=pair.borrower_group,
        meu_w=pair.meu_w,
        meu_m=pair.extent.meu_m,
        extent_bytes=pair.extent.num_bytes,
        num_extents=pair.pool_extents,
        lender_base_offset_bytes=regions[pair.lender_group].base_offset_bytes,
        borrower_group_bytes=int(pair.borrower.pool_bytes * pair.borrower.borrowing_parts[pair.borrower_group]),
    )
