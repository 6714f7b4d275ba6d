"""An engine's part in lending: puts the coordinator, the transport and the scheduler's links together."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import zmq

from swiftkv._core import GroupSpec, Link, Scheduler, StepPlan
from swiftkv.cache.geometry import GroupRegion
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine.runner import ModelRunner
from swiftkv.lease.coordinator import Coordinator
from swiftkv.lease.messages import LendingSpec, LinkGeometry
from swiftkv.lease.process import Identity
from swiftkv.lease.wire import SocketWire
from swiftkv.master.borrower import Borrower
from swiftkv.master.layer_stream import CopyKind
from swiftkv.transport.base import PeerHandle, TwoSidedTransport
from swiftkv.transport.p2p import serve_p2p
from swiftkv.transport.rendezvous import find_pool, publish_pool
from swiftkv.worker.lender import Lender

_RENDEZVOUS_TIMEOUT_S = 10.0
_COPY_KINDS: tuple[CopyKind, ...] = ("spill", "load", "store")


def make_scheduler(config: EngineConfig, group_specs: list[GroupSpec]) -> Scheduler:
    """Make the scheduler of an engine, with the links that its configuration names."""
    spec = config.lending
    lend_links = [
        Link(link.lender_group, link.num_extents, link.meu_w)
        for peer in (spec.borrowers if spec else [])
        for link in peer.links
    ]
    borrow_links = [
        Link(link.borrower_group, link.num_extents, link.meu_m, link.extent_bytes, link.lender_base_offset_bytes)
        for peer in (spec.lenders if spec else [])
        for link in peer.links
    ]
    scheduler = Scheduler(
        group_specs,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_chunked_prefill=config.enable_chunked_prefill,
        lend_links=lend_links,
        borrow_links=borrow_links,
        stream_buffers=spec.stream_buffers if spec else 2,
        retention_interval=config.retention_interval,
        scheduling_policy=config.scheduling_policy,
        target_tpot_s=config.target_tpot_s,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
    )
    if config.step_time_s:
        scheduler.remember_step_time(config.step_time_s)
    return scheduler


class Lending:
    """The part of lending that the step loop does, and the thread that does the rest.

    Without a `LendingSpec` there is no thread, and every call returns at once.
    """

    def __init__(
        self, config: EngineConfig, runner: ModelRunner, scheduler: Scheduler, context: zmq.Context[zmq.Socket[bytes]]
    ) -> None:
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when the engine should look whether there is something to do."""
        self._runner = runner
        self._scheduler = scheduler
        self._wire: SocketWire | None = None
        self._borrower: Borrower | None = None
        self._coordinator: Coordinator | None = None
        if config.lending is not None:
            self._start(config, config.lending, context)

    def before_step(self, finish_steps: Callable[[], None]) -> None:
        """Apply what came for lending, between steps and before the engine waits.

        `finish_steps` commits the steps that are in progress.

        Raises `RuntimeError` if a defect ended the coordinator's thread.
        """
        if self._coordinator is not None:
            self._coordinator.check()
        if self._borrower is not None:
            self._borrower.apply_pending(finish_steps)

    def demand_changed(self) -> None:
        """Note that requests came, grew or went: what is lent may be needed here."""
        if self._wire is not None and self._scheduler.is_short():
            self._wire.wake()

    def transfer_failed(self, plan: StepPlan, links: Sequence[int] = ()) -> None:
        """Give up a step whose copies over `links` did not arrive; if there are none, it is not known over which.

        The step does not count, and those lenders are attached anew.
        """
        assert self._coordinator is not None
        assert self._borrower is not None
        self._scheduler.abandon()
        self._coordinator.wait_for(self._borrower.give_up(links or links_of(plan, len(self._runner.group_specs))))

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
        if self._borrower is not None:
            self._borrower.close()
        if self._wire is not None:
            self._wire.close()
        os.close(self.wake_fd)

    def _start(self, config: EngineConfig, spec: LendingSpec, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        me = Identity.of_this_process(config.name)
        wire = self._wire = SocketWire(context, spec.leases_address, spec.lenders)
        lender = self._open_lender(me, spec, wire, config.copy_deadline_s) if spec.borrowers else None
        self._borrower = self._open_borrower(me, spec, wire) if spec.lenders else None
        self._coordinator = Coordinator(
            config.name,
            wire,
            self._scheduler,
            pool_bytes=self._runner.pool.nbytes,
            lender=lender,
            borrower=self._borrower,
            on_end=self.wake,
        )
        self._coordinator.start()

    def _open_lender(self, me: Identity, spec: LendingSpec, wire: SocketWire, deadline_s: float) -> Lender:
        pool = self._runner.pool
        check_links([link for peer in spec.borrowers for link in peer.links], pool.regions)

        def serve_link(store_path: str) -> threading.Thread | None:
            published = publish_pool(Path(store_path), pool)
            return serve_p2p(pool, published, deadline_s=deadline_s) if spec.transport == "p2p" else None

        return Lender(
            me,
            spec,
            wire,
            scheduler=self._scheduler,
            pool_bytes=pool.nbytes,
            serve_link=serve_link,
            wake_engine=self.wake,
        )

    def _open_borrower(self, me: Identity, spec: LendingSpec, wire: SocketWire) -> Borrower:
        transport = self._runner.transport
        assert transport is not None

        def find(store_path: str) -> PeerHandle:
            peer = find_pool(Path(store_path), _RENDEZVOUS_TIMEOUT_S)
            return transport.meet(peer) if isinstance(transport, TwoSidedTransport) else peer

        return Borrower(
            me,
            spec,
            wire,
            scheduler=self._scheduler,
            find=find,
            attach=transport.attach,
            detach=transport.detach,
            wake_engine=self.wake,
        )

    def wake(self) -> None:
        """Have the engine look whether there is something to do. Any thread may call this."""
        os.eventfd_write(self.wake_fd, 1)


def check_links(links: Sequence[LinkGeometry], regions: Sequence[GroupRegion]) -> None:
    """Check that borrowers were told where this pool is: elsewhere they would write into memory that is not theirs."""
    for link in links:
        region = regions[link.lender_group]
        assert link.lender_base_offset_bytes == region.base_offset_bytes, f"{link} begins elsewhere: {region}"
        assert link.extent_bytes == link.meu_w * region.group.block_bytes, f"{link} has other blocks: {region}"
        assert link.num_extents * link.meu_w <= region.num_blocks, f"{link} is longer than {region}"


def links_of(plan: StepPlan, num_groups: int) -> list[int]:
    """Return the borrow links that a step copies over."""
    links: set[int] = set()
    for group in range(num_groups):
        for kind in _COPY_KINDS:
            for buffer in range(max(1, plan.num_stream_buffers)):
                links.update(np.unique(plan.copies(group, kind, buffer)[:, 0]).tolist())
    return sorted(links)
