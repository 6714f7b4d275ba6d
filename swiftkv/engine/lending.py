"""An engine's part in lending: connects its roles, the transport and the scheduler's links."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import zmq

from swiftkv._core import GroupSpec, Scheduler, StepPlan
from swiftkv.cache.geometry import GroupRegion
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine.runner import ModelRunner
from swiftkv.lease.coordinator import Coordinator
from swiftkv.lease.messages import LeasedBytes, LendingSpec, LinkGeometry
from swiftkv.lease.wire import SocketWire
from swiftkv.lending_party import borrow_links, lend_links, open_party
from swiftkv.master.borrower import Borrower
from swiftkv.master.layer_stream import runs_of
from swiftkv.transport.base import PeerHandle
from swiftkv.transport.p2p import serve_p2p
from swiftkv.transport.rendezvous import find_pool, publish_pool
from swiftkv.wakeup import Wakeup
from swiftkv.worker.lender import Lender

_RENDEZVOUS_TIMEOUT_S = 10.0


def make_scheduler(config: EngineConfig, group_specs: list[GroupSpec]) -> Scheduler:
    """Make the scheduler of an engine, with the links that its configuration names."""
    spec = config.lending
    scheduler = Scheduler(
        group_specs,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        lend_links=lend_links(spec),
        borrow_links=borrow_links(spec),
        stream_buffers=spec.stream_buffers if spec else 2,
        retention_interval=config.retention_interval,
        scheduling_policy=config.scheduling_policy,
        target_tpot_s=config.target_tpot_s,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        **(msgspec.structs.asdict(config.prompt_lookup) if config.prompt_lookup else {}),
    )
    if config.step_time_s:
        scheduler.remember_step_time(config.step_time_s)
    return scheduler


class Lending:
    """Lending as the step loop sees it: starts the coordinator's thread, and applies lease changes between steps.

    Without a `LendingSpec` there is no thread, and every call returns at once.
    """

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, scheduler: Scheduler, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self.wakeup = Wakeup()
        """Wakes the engine when there may be something to do."""
        self._runner = runner
        self._scheduler = scheduler
        self._wire: SocketWire | None = None
        self._lender: Lender | None = None
        self._borrower: Borrower | None = None
        self._coordinator: Coordinator | None = None
        self._num_links = len(borrow_links(config.lending))
        if config.lending is not None:
            self._start(config, config.lending, context)

    def before_step(self, finish_steps: Callable[[], None]) -> None:
        """Apply changes of leases; call between steps and before the engine waits.

        `finish_steps` commits the steps that are in progress.

        Raises `RuntimeError` if a defect ended the coordinator's thread.
        """
        if self._coordinator is not None:
            self._coordinator.check()
        if self._borrower is not None:
            self._borrower.apply_pending(finish_steps)

    def demand_changed(self) -> None:
        """Wake the coordinator if the engine's own requests are short of blocks: it then recalls some.

        Call it when requests have come, grown or ended.
        """
        if self._wire is not None and self._scheduler.is_short():
            self._wire.wake()

    def leased_bytes(self) -> LeasedBytes:
        """Return the bytes that changed hands since the engine started."""
        lender, borrower = self._lender, self._borrower
        return LeasedBytes(
            lent=lender.lent_total_bytes if lender else 0,
            taken_back=lender.taken_back_total_bytes if lender else 0,
            borrowed=borrower.borrowed_total_bytes if borrower else 0,
            given_back=borrower.given_back_total_bytes if borrower else 0,
        )

    def transfer_failed(self, plan: StepPlan, links: Sequence[int] = ()) -> None:
        """Give up a step whose copies over `links` failed. If `links` is empty, all links of the step count as failed.

        The step's results are discarded. The lenders are detached, and attached again later; host memory stays.
        """
        self._scheduler.abandon()
        copied = links or links_of(plan, len(self._runner.group_specs))
        lenders = [link for link in copied if link < self._num_links]
        if lenders:
            assert self._coordinator is not None
            assert self._borrower is not None
            self._coordinator.wait_for(self._borrower.give_up(lenders))

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
        if self._borrower is not None:
            self._borrower.close()
        if self._wire is not None:
            self._wire.close()
        self.wakeup.close()

    def _start(self, config: EngineConfig, spec: LendingSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        wire = self._wire = SocketWire(context, spec.leases_address, spec.lenders)
        check_links([link for peer in spec.borrowers for link in peer.links], self._runner.pool.regions)
        party = open_party(
            config.name,
            spec,
            wire,
            scheduler=self._scheduler,
            pool_bytes=self._runner.pool.nbytes,
            serve_link=partial(_serve_link, self._runner, spec.transport, config.copy_deadline_s),
            peer_pools=_PeerPools(self._runner),
            wake_engine=self.wakeup.wake,
            other_pids=[memory.pid for memory in self._runner.other_ranks],
        )
        self._lender, self._borrower, self._coordinator = party.lender, party.borrower, party.coordinator
        self._coordinator.start()


class _PeerPools:
    """The `PeerPools` of an engine: attaches lenders' pools to the transport of all ranks."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def find(self, store_path: str) -> PeerHandle:
        assert self._runner.transport is not None
        return self._runner.transport.meet(find_pool(Path(store_path), _RENDEZVOUS_TIMEOUT_S))

    def attach(self, link: int, pool: PeerHandle) -> None:
        self._runner.attach_lender(link, pool)

    def detach(self, link: int) -> None:
        self._runner.detach_lender(link)


def _serve_link(runner: ModelRunner, transport: str, deadline_s: float, store_path: str) -> threading.Thread | None:
    """Publish an engine's pool for one link. Return the thread that serves it; `None` if the transport needs none."""
    published = publish_pool(Path(store_path), runner.pool, runner.other_ranks, is_mapped=transport != "p2p")
    return serve_p2p(runner.pool, published, deadline_s=deadline_s) if transport == "p2p" else None


def check_links(links: Sequence[LinkGeometry], regions: Sequence[GroupRegion]) -> None:
    """Assert that borrowers know where this pool's blocks lie. Otherwise they would write to the wrong memory."""
    for link in links:
        region = regions[link.lender_group]
        assert link.lender_base_offset_bytes == region.base_offset_bytes, f"{link} begins elsewhere: {region}"
        assert link.extent_bytes == link.meu_w * region.group.block_bytes, f"{link} has other blocks: {region}"
        assert link.num_extents * link.meu_w <= region.num_blocks, f"{link} is longer than {region}"


def links_of(plan: StepPlan, num_groups: int) -> list[int]:
    """Return the links that a step copies over: borrow links, and the one behind them, which is host memory."""
    return sorted({link for _, _, _, runs in runs_of(plan, num_groups) for link in runs[:, 0].tolist()})
