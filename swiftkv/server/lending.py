"""The gateway's connection to the coordinators of its engines, which shows and sets what they lend."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from swiftkv.lease.messages import (
    BORROWER_STATES,
    LENDER_STATES,
    MAX_LEASE_MESSAGE_BYTES,
    BudgetSet,
    FromAdmin,
    GroupBlocks,
    LendingState,
    LinkState,
    SetBudget,
    ShowLending,
    ToAdmin,
)
from swiftkv.server.client import EngineClient
from swiftkv.server.engine_state import EngineState
from swiftkv.server.errors import ApiError
from swiftkv.server.lending_metrics import LendingMetrics
from swiftkv.server.node_views import (
    BudgetChange,
    ExtentView,
    LendingOverview,
    LinkExtents,
    LinkView,
    ModelLending,
    PoolView,
)
from swiftkv.server.pending import PendingCalls
from swiftkv.units import Budget, format_size

logger = logging.getLogger(__name__)

_SHOW_TIMEOUT_S = 5.0
_SCRAPE_TIMEOUT_S = 1.0
_RECALL_TIMEOUT_S = 60.0
_RETRY_S = 1.0
_MAY_HAPPEN = "what was asked for may still happen: see GET /admin/lending"
_RECONNECT_MS = 50


class CoordinatorClient:
    """The gateway's end of one engine's coordinator, across restarts of the engine.

    Create it inside the event loop. The supervisor of the engine runs `receive`.
    """

    def __init__(self, name: str, leases_address: str) -> None:
        self._name = name
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no message waits for an engine that is not there
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_LEASE_MESSAGE_BYTES)
        self._socket.connect(leases_address)
        self._calls: PendingCalls[ToAdmin] = PendingCalls()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToAdmin] = msgspec.msgpack.Decoder(ToAdmin)

    def close(self) -> None:
        """Close the socket, and fail the calls that wait for an answer; `receive` must have ended."""
        self._calls.fail(self._removed())
        self._socket.close()
        self._context.term()

    def engine_ended(self) -> None:
        """Fail the calls that the engine has not answered: it has ended, and the next one does not know of them."""
        self._calls.fail(
            ApiError(
                503,
                f"the engine of model '{self._name}' ended meanwhile; {_MAY_HAPPEN}",
                code="engine_unavailable",
                retry_after_s=_RETRY_S,
            )
        )

    async def set_budget(self, budget_bytes: int, dry_run: bool) -> BudgetSet:
        """Set the budget; return when all recalled extents are home.

        Raises `ApiError` 503 if that takes too long, or the engine ends.
        """
        answer = await self._ask(lambda request_id: SetBudget(request_id, budget_bytes, dry_run), _RECALL_TIMEOUT_S)
        assert isinstance(answer, BudgetSet)
        return answer

    async def show(self, with_extents: bool, timeout_s: float = _SHOW_TIMEOUT_S) -> LendingState:
        """Return the state of the engine's leases. Raises `ApiError` 503 if no answer comes in time."""
        answer = await self._ask(lambda request_id: ShowLending(request_id, with_extents), timeout_s)
        assert isinstance(answer, LendingState)
        return answer

    async def _ask(self, request: Callable[[int], FromAdmin], timeout_s: float) -> ToAdmin:
        self._check_open()
        with self._calls.new() as (request_id, answer):
            try:
                async with asyncio.timeout(timeout_s):
                    await self._socket.send(self._encoder.encode(request(request_id)))
                    return await answer
            except TimeoutError:
                raise ApiError(
                    503,
                    f"model '{self._name}' did not answer about lending within {timeout_s:g} s; {_MAY_HAPPEN}",
                    code="engine_unavailable",
                    retry_after_s=_RETRY_S,
                ) from None
            except asyncio.CancelledError:
                task = asyncio.current_task()
                assert task is not None
                if not task.cancelling():
                    self._check_open()  # `close` cancels what is being sent, but not this task
                raise

    def _check_open(self) -> None:
        if self._socket.closed:
            raise self._removed()

    def _removed(self) -> ApiError:
        return ApiError(503, f"model '{self._name}' was removed meanwhile", code="engine_unavailable")

    async def receive(self) -> NoReturn:
        """Take the coordinator's answers, until cancelled. Raises if one cannot be read."""
        while True:
            answer = self._decoder.decode(await self._socket.recv())
            self._calls.answered(answer.request_id, answer)


@dataclass(frozen=True, slots=True)
class Outsider:
    """A model that neither lends nor borrows. `why_not_lend` completes "model 'x' …"."""

    why_not_lend: str


@dataclass(frozen=True, slots=True)
class Borrower:
    """A model that borrows, and cannot lend. `why_not_lend` completes "model 'x' …"."""

    coordinator: CoordinatorClient
    why_not_lend: str


@dataclass(frozen=True, slots=True)
class Lender:
    """A model that lends up to a budget, which holds while its engine is awake and after it is started again."""

    coordinator: CoordinatorClient
    block_bytes: int
    budget_bytes: Callable[[], int]
    """Returns the budget in bytes."""
    remember_budget: Callable[[int], None]
    """Sets it."""


@dataclass(frozen=True, slots=True)
class LendingMember:
    """One model of the node, and its part in lending."""

    name: str
    role: str
    pool_bytes: int
    engine: EngineClient
    part: Lender | Borrower | Outsider

    @property
    def coordinator(self) -> CoordinatorClient | None:
        """The coordinator of the model, if it lends or borrows."""
        return None if isinstance(self.part, Outsider) else self.part.coordinator

    def budget_in(self, state: LendingState) -> int | None:
        """Return the budget in a state of the model's leases, if the model can have a budget."""
        return state.budget_bytes if isinstance(self.part, Lender) else None


class NodeLending:
    """Lending of the whole node, as `/admin` and `/metrics` show it."""

    def __init__(self, members: Sequence[LendingMember], enabled: bool, transport: str) -> None:
        self._members = {member.name: member for member in members}
        self._enabled = enabled
        self._transport = transport

    def add(self, member: LendingMember) -> None:
        self._members[member.name] = member

    def remove(self, name: str) -> None:
        del self._members[name]

    async def overview(self) -> LendingOverview:
        """Return the lending of every model; one that does not answer in time has an `error`."""
        models = await asyncio.gather(*(self._model_lending(member) for member in self._members.values()))
        return LendingOverview(self._enabled, self._transport, models)

    async def set_budget(self, name: str, budget: Budget) -> BudgetChange:
        """Set the budget of model `name`, and wait until the extents that it lends beyond that are home.

        Raises `ApiError`: 404 for no such model, 409 for one that cannot lend, 400 for an impossible budget, 503 if it
        does not answer.
        """
        lender, budget_bytes = self._lender_for(name, budget)
        lender.remember_budget(budget_bytes)  # at once: it holds when the engine reads it, and recalls may take long
        answer = await lender.coordinator.set_budget(budget_bytes, dry_run=False)
        if answer.refused is not None:
            lender.remember_budget(answer.budget_bytes)
            raise _refused(name, answer.refused)
        budget_words, recalled = format_size(answer.budget_bytes), format_size(answer.recalled_bytes)
        logger.info("%s: lends up to %s now; %s came back in %.3f s", name, budget_words, recalled, answer.took_s)
        return _change(name, answer, dry_run=False)

    async def try_budget(self, name: str, budget: Budget) -> BudgetChange:
        """Return the change that `set_budget` would make, and make none. Raises `ApiError` as `set_budget` does."""
        lender, budget_bytes = self._lender_for(name, budget)
        answer = await lender.coordinator.set_budget(budget_bytes, dry_run=True)
        if answer.refused is not None:
            raise _refused(name, answer.refused)
        return _change(name, answer, dry_run=True)

    def _lender_for(self, name: str, budget: Budget) -> tuple[Lender, int]:
        """Return a model that can be given a budget now, and the budget in bytes. Raises `ApiError` as `set_budget`."""
        member = self._member(name)
        lender = member.part
        if not isinstance(lender, Lender):
            raise ApiError(409, f"model '{name}' {lender.why_not_lend}", param="worker", code="cannot_lend")
        budget_bytes = budget.bytes_of(member.pool_bytes)
        # kv_cache.memory, which users know, may exceed the pool by less than a block.
        if budget_bytes >= member.pool_bytes + lender.block_bytes:
            pool = format_size(member.pool_bytes)
            raise ApiError(400, f"{budget} is more than the pool of '{name}', {pool}; 100% is the most", param="budget")
        _check_there(member)
        return lender, min(budget_bytes, member.pool_bytes)

    async def pool(self, name: str) -> PoolView:
        """Return a model's pool, extent by extent.

        Raises `ApiError`: 404 for no such model, 409 for one that has no part in lending, 503 for no answer.
        """
        member = self._member(name)
        if isinstance(member.part, Outsider):
            raise ApiError(409, f"model '{name}' {member.part.why_not_lend}", param="model", code="cannot_lend")
        _check_there(member)
        state = await member.part.coordinator.show(with_extents=True)
        return PoolView(
            model=name,
            pool_bytes=state.pool_bytes,
            budget_bytes=member.budget_in(state),
            groups=state.groups,
            lends=[_extents(link, name, lends=True) for link in state.lends],
            borrows=[_extents(link, name, lends=False) for link in state.borrows],
        )

    async def lend_all(self, name: str) -> None:
        """Let a model lend its whole pool, until its engine is started again or another budget is set."""
        member = self._member(name)
        await _lend_up_to(member, lambda lender: member.pool_bytes)

    async def lend_as_before(self, name: str) -> None:
        """Let a model lend what its budget allows; wait until extents beyond that are home, if its borrowers answer."""
        await _lend_up_to(self._member(name), lambda lender: lender.budget_bytes())

    async def recall_all(self, name: str) -> None:
        """Recall all that a model lends; wait until it is home, if its borrowers answer."""
        await _lend_up_to(self._member(name), lambda lender: 0)

    async def observe(self, metrics: LendingMetrics, only_model: str | None) -> None:
        """Ask the coordinators of all models, or of one, for the figures of `metrics`; silent ones are left out."""
        members = [m for m in self._members.values() if m.coordinator and only_model in (None, m.name)]
        for member, answer in zip(members, await asyncio.gather(*map(_scraped, members)), strict=True):
            metrics.observe(member.name, answer)

    async def _model_lending(self, member: LendingMember) -> ModelLending:
        error, state = None, None
        try:
            if member.coordinator is not None:
                _check_there(member)
                state = await member.coordinator.show(with_extents=False)
        except ApiError as unavailable:
            error = unavailable.message
        lends = state.lends if state else []
        borrows = state.borrows if state else []
        return ModelLending(
            model=member.name,
            role=member.role,
            state=str(member.engine.state),
            error=error,
            pool_bytes=member.pool_bytes,
            budget_bytes=member.budget_in(state) if state else None,
            lent_bytes=sum(link.num_bytes for link in lends) if state else None,
            borrowed_bytes=sum(link.num_bytes for link in borrows) if state else None,
            borrowed_blocks=_borrowed_blocks(state.groups) if state else None,
            recalls=state.recalls_total if state else None,
            groups=state.groups if state else None,
            lends=[_link(link, member.name, lends=True) for link in lends],
            borrows=[_link(link, member.name, lends=False) for link in borrows],
        )

    def _member(self, name: str) -> LendingMember:
        if name not in self._members:
            known = ", ".join(self._members)
            raise ApiError(404, f"no model '{name}'; this node has: {known}", param="model", code="model_not_found")
        return self._members[name]


async def _lend_up_to(member: LendingMember, budget_bytes: Callable[[Lender], int]) -> None:
    """Set how much a model lends, if it can lend and has a process; its remembered budget stays."""
    if isinstance(member.part, Lender) and member.engine.engine is not None:
        with suppress(ApiError):
            await member.part.coordinator.set_budget(budget_bytes(member.part), dry_run=False)


def _refused(name: str, why: str) -> ApiError:
    return ApiError(400, f"model '{name}' refuses the budget: {why}", param="budget", code="budget_refused")


def _change(name: str, answer: BudgetSet, *, dry_run: bool) -> BudgetChange:
    return BudgetChange(
        name,
        dry_run,
        budget_bytes=answer.budget_bytes,
        lent_bytes=answer.lent_bytes,
        recalled_bytes=answer.recalled_bytes,
        took_s=answer.took_s,
    )


def _check_there(member: LendingMember) -> None:
    """Raise `ApiError` 503 unless the model has a process, asleep or not."""
    if member.engine.engine is None:
        raise member.engine.status.refusal(member.name)


async def _scraped(member: LendingMember) -> LendingState | None:
    assert member.coordinator is not None
    engine = member.engine
    if engine.engine is None or engine.state in (EngineState.NOT_RESPONDING, EngineState.STOPPED):
        return None
    try:
        return await member.coordinator.show(with_extents=False, timeout_s=_SCRAPE_TIMEOUT_S)
    except ApiError:
        return None


def _borrowed_blocks(groups: Sequence[GroupBlocks]) -> dict[str, int]:
    return {
        "free": sum(group.borrowed_free for group in groups),
        "used": sum(group.borrowed_used for group in groups),
        "cached": sum(group.borrowed_cached for group in groups),
        "in_flight": sum(group.borrowed_in_flight for group in groups),
    }


def _link(link: LinkState, name: str, lends: bool) -> LinkView:
    lender, borrower = (name, link.peer) if lends else (link.peer, name)
    geometry = link.geometry
    return LinkView(
        lender=lender,
        lender_group=geometry.lender_group,
        borrower=borrower,
        borrower_group=geometry.borrower_group,
        peer_state=link.peer_state,
        heard_s_ago=link.heard_s_ago,
        extent_bytes=geometry.extent_bytes,
        meu_w=geometry.meu_w,
        meu_m=geometry.meu_m,
        num_extents=geometry.num_extents,
        extents=link.counts,
        lent_bytes=link.num_bytes,
        no_offer_s=link.no_offer_s,
    )


def _extents(link: LinkState, name: str, lends: bool) -> LinkExtents:
    lender, borrower = (name, link.peer) if lends else (link.peer, name)
    names = LENDER_STATES if lends else BORROWER_STATES
    states = np.frombuffer(link.states or b"", np.uint8).tolist()
    epochs = np.frombuffer(link.epochs or b"", "<u4").tolist()
    extents = [
        # The lender may write only to an extent that is home (or was never offered).
        ExtentView(extent, names[state], owner=borrower if state else lender, epoch=epoch)
        for extent, (state, epoch) in enumerate(zip(states, epochs, strict=True))
    ]
    return LinkExtents(
        lender=lender,
        lender_group=link.geometry.lender_group,
        borrower=borrower,
        borrower_group=link.geometry.borrower_group,
        extents=extents,
    )
