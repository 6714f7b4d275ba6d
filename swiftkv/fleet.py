"""The models of a node: the parts of each, from its configuration to the task that keeps its engine running."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn

import msgspec

from swiftkv.config import Config
from swiftkv.engine.messages import EngineConfig, Ready, ShareSpec
from swiftkv.engine_configs import compile_engines, why_not_lend
from swiftkv.host_tiers import HostTiers, check_fits_machine
from swiftkv.learnt import LearntStepTimes, fingerprint
from swiftkv.model_config import ModelConfig
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.planning.node import plan_one_more
from swiftkv.planning.replacement import check_replacement
from swiftkv.planning.transports import lending_transports
from swiftkv.server.client import EngineClient
from swiftkv.server.engine_state import EngineState
from swiftkv.server.forecast import ForecastLimits
from swiftkv.server.lending import Borrower, CoordinatorClient, Lender, LendingMember, NodeLending, Outsider
from swiftkv.server.metrics import GatewayMetrics, ModelMetrics
from swiftkv.server.outlook import Outlook
from swiftkv.server.sleep import Sleeper
from swiftkv.server.storage_changes import StorageChanges
from swiftkv.shares import ShareTable
from swiftkv.supervisor import EngineSupervisor
from swiftkv.tasks import Tasks

_KEEP_EVERY_S = 60.0
_PART_GIVING_WAY = 0.1  # of `load_timeout`
_UNLIMITED_S = 600.0  # in place of a `load_timeout` that is off


@dataclass(frozen=True, slots=True)
class Member:
    """One model."""

    config: ModelConfig
    plan: ModelPlan
    lenders: tuple[str, ...]  # the lenders that its engine knows
    client: EngineClient
    coordinator: CoordinatorClient | None  # None: it neither lends nor borrows
    supervisor: EngineSupervisor
    sleeper: Sleeper
    storage: StorageChanges
    shape: str  # the fingerprint under which step times are learnt


class Fleet:
    """The models of a node, and what they share. Create it inside the event loop.

    An engine learns of its lenders and borrowers at its start: a model that is added lends to, and borrows from, those
    that are started after it.
    """

    def __init__(
        self,
        config: Config,
        plans: Sequence[ModelPlan],
        *,
        ipc: Path,
        metrics: GatewayMetrics,
        tasks: Tasks,
        say: Callable[[str], None],
        state: Path | None = None,
    ) -> None:
        """`ipc` is the directory of the node's sockets; `say` prints a line on the node's standard output.

        `state` is the directory in which learnt step times are kept.
        """
        self.config = config
        self.transports = lending_transports(config, plans)
        self.members: dict[str, Member] = {}
        self._ipc = ipc
        self._metrics = metrics
        self._tasks = tasks
        self._keepers: dict[str, asyncio.Task[None]] = {}  # by model: the task that keeps its engine running
        self._say = say
        self._learnt = LearntStepTimes(state)
        self._environment = engine_environment(config)
        self._shares: dict[str, ShareTable] = {}  # by device: of the cores, and of each GPU
        self._accounts: dict[str, int] = {}  # in these tables, by model
        self._host_tiers = HostTiers()
        self._numbers = {plan.name: number for number, plan in enumerate(plans)}
        kinds = sorted({choice.kind for choice in self.transports.values()})
        self.lending = NodeLending([], config.node.lending.enabled, ", ".join(kinds) or config.node.lending.transport)
        engines = compile_engines(config, plans, self.transports, ipc, self._numbers)
        for model, plan, engine in zip(config.models, plans, engines, strict=True):
            self._make(model, plan, self._host_tiers.equip(plan, engine, plans))
        self._link()

    @property
    def plans(self) -> list[ModelPlan]:
        return [member.plan for member in self.members.values()]

    def plan(self, section: object) -> tuple[Config, ModelPlan]:
        """Check a model that is to be added, and size it. Starts nothing, and may take a while.

        Raises `ConfigError` with one line per mistake.
        """
        config = self.config.with_model(section)
        plan = plan_one_more(config, self.plans)
        self._check_room(plan)
        self._host_tiers.check([*self.plans, plan])
        return config, plan

    def _check_room(self, plan: ModelPlan) -> None:
        """Raise `ConfigError` if a model that is to be loaded does not fit the machine beside the others.

        A model that sleeps holds its pool at level 1, and nothing at level 2.
        """
        held = []
        for member in self.members.values():
            is_asleep = member.client.state is EngineState.ASLEEP
            if member.plan.name != plan.name and (member.supervisor.has_process or not is_asleep):
                held.append(replace(member.plan, weight_bytes=0) if is_asleep else member.plan)
        check_fits_machine([*held, plan])

    def check_files(self, name: str) -> None:
        """Raise `ConfigError` unless a model could be started again with its current files."""
        member = self.members[name]
        check_replacement(member.config, self.config, member.plan)

    def add(self, config: Config, plan: ModelPlan) -> Member:
        """Make the last model of `config`, which `plan` returned with its plan."""
        plans = [*self.plans, plan]
        self._numbers.setdefault(plan.name, len(self._numbers))
        self.transports = lending_transports(config, plans) | self.transports  # transports in use stay
        *others, engine = compile_engines(config, plans, self.transports, self._ipc, self._numbers)
        engine = self._host_tiers.equip(plan, engine, plans)
        self.config = config
        for known, other in zip(self.members.values(), others, strict=True):
            if known.coordinator is not None and other.lending is not None:
                known.supervisor.meet(other.lending)
        member = self._make(config.models[-1], plan, engine)
        self._link()
        return member

    async def start(
        self, member: Member, before_restart: Callable[[str], Awaitable[None]], *, behind_others: bool = False
    ) -> Ready:
        """Start a model's engine, and keep it running from then on; return when it serves.

        `before_restart` is called with the model's name before each further start; if it raises `EngineError`, that
        start has failed. With `behind_others`, loading gives way to other models that have requests.

        Raises `EngineError` if the engine does not come up.
        """
        name, supervisor = member.plan.name, member.supervisor
        member.client.start()
        ready = await (supervisor.start_behind_others() if behind_others else supervisor.start())
        keeping = supervisor.keep_running(partial(before_restart, name), partial(self._host_tiers.clean_up, name))
        self._keepers[name] = self._tasks.start(keeping, f"the supervisor of {name}")
        return ready

    async def end(self, name: str) -> None:
        """End a model's engine, whether or not it came up, and forget the model."""
        member = self.members[name]
        member.client.status.drain()
        if keeper := self._keepers.pop(name, None):
            await self._tasks.end(keeper)
        await member.supervisor.stop()
        self._forget(name)

    async def stop_engines(self) -> None:
        """End the engines of all models; the tasks that would start them again must have ended."""
        await asyncio.gather(*(member.supervisor.stop() for member in self.members.values()))

    def _forget(self, name: str) -> None:
        """Forget a model whose process has ended, and free everything that it used."""
        member = self.members.pop(name)
        self.config = self.config.without_model(name)
        self.lending.remove(name)
        if name in self._accounts:
            self._shares[member.config.device].give_back(self._accounts.pop(name))
        self._link()
        if member.coordinator is not None:
            member.coordinator.close()
        member.client.close()
        self._host_tiers.release(name)
        for left in self._ipc.glob(f"{self._numbers[name]}.*"):
            if left.is_dir():  # of an engine with several ranks that was killed
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)

    def give_way_s(self, name: str) -> float:
        """Return the seconds for which a model that is loaded now gives way to others: 0 unless they have requests."""
        are_busy = any(member.client.num_in_flight for other, member in self.members.items() if other != name)
        return (self.config.node.load_timeout or _UNLIMITED_S) * _PART_GIVING_WAY if are_busy else 0.0

    async def keep_learning(self) -> NoReturn:
        """Keep the learnt step times, once a minute."""
        while True:
            await asyncio.sleep(_KEEP_EVERY_S)
            await self.keep_learnt()

    async def keep_learnt(self) -> None:
        """Keep the step times that engines have learnt, for engines that are started later."""
        for member in self.members.values():
            if member.client.stats is not None:
                self._learnt.note(member.shape, member.client.stats.usual_step_time_s)
        await self._learnt.save()

    def close(self) -> None:
        """Close every socket; call after the supervisors have stopped."""
        for name in list(self.members):
            self._forget(name)
        for table in self._shares.values():
            table.close()

    def _make(self, model: ModelConfig, plan: ModelPlan, engine: EngineConfig) -> Member:
        metrics = self._metrics.for_model(plan.name)
        engine = msgspec.structs.replace(engine, share=self._share_of(model))
        client = EngineClient(
            plan.name,
            engine.requests_address,
            engine.outputs_address,
            metrics,
            max_in_flight=model.max_num_queued_reqs,
            outlook=_outlook(model, metrics),
            weight_bytes=plan.weight_bytes,
        )
        lending = engine.lending
        coordinator = None if lending is None else CoordinatorClient(plan.name, lending.leases_address)
        shape = fingerprint(engine)
        give_way_s = partial(self.give_way_s, plan.name)
        supervisor = EngineSupervisor(
            engine,
            client,
            coordinator,
            node=self.config.node,
            say=self._say,
            environment=self._environment,
            step_time_s=lambda: self._learnt.of(shape),
            give_way_s=give_way_s,
        )
        pool_bytes = plan.pool_bytes if isinstance(plan, SizedPlan) else 0
        part = _part_in_lending(plan, why_not_lend(self.config, plan, lending), coordinator, supervisor)
        self.lending.add(LendingMember(plan.name, plan.role, pool_bytes, client, part))
        sleeper = Sleeper(
            client,
            self.lending,
            supervisor.put_to_rest,
            give_way_s=give_way_s,
            check_room=partial(self._check_room, plan),
            can_stay=model.tensor_parallel_size == 1,
        )
        lenders = () if lending is None else tuple(peer.name for peer in lending.lenders)
        storage = StorageChanges(
            plan.name,
            client.storage,
            spec=supervisor.storage,
            remember=supervisor.set_storage,
            directory=self.config.directory,
            io_backend=self.config.node.lending.io_backend,
            why_not=next(model.why_not_below("storage"), None),
        )
        member = Member(model, plan, lenders, client, coordinator, supervisor, sleeper, storage, shape)
        self.members[plan.name] = member
        return member

    def _share_of(self, model: ModelConfig) -> ShareSpec | None:
        """Return a new account for a model that shares the cores or a GPU with others, `None` for any other.

        If there are more models than accounts, the last ones wait for no other.
        """
        share = model.share
        if share is None:
            return None
        if model.device not in self._shares:
            self._shares[model.device] = ShareTable.create()
        table = self._shares[model.device]
        if (account := table.take_account()) is None:
            return None
        self._accounts[model.name] = account
        resource: Literal["cores", "gpu"] = "cores" if model.device == "cpu" else "gpu"
        return ShareSpec(resource, table.fd, account, share.weight, share.max_share)

    def _link(self) -> None:
        """Tell each supervisor which engines its own engine may have to wait for."""
        for member in self.members.values():
            there = (self.members[name] for name in member.lenders if name in self.members)
            member.supervisor.lenders = [lender.supervisor for lender in there]


def _part_in_lending(
    plan: ModelPlan, why_not: str | None, coordinator: CoordinatorClient | None, supervisor: EngineSupervisor
) -> Lender | Borrower | Outsider:
    """Return a model's part in lending; `why_not` says why it cannot lend, if it cannot."""
    if coordinator is None:
        assert why_not is not None
        return Outsider(why_not)
    if why_not is not None:
        return Borrower(coordinator, why_not)
    return Lender(coordinator, plan.block_bytes, supervisor.lending_budget, supervisor.set_lending_budget)


def _outlook(model: ModelConfig, metrics: ModelMetrics) -> Outlook:
    limits = ForecastLimits(
        policy=model.scheduling_policy,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        block_size=model.kv_cache.block_size,
        step_limit_s=model.step_limit_s,
        due_s=model.due_s,
    )
    return Outlook(
        model.name,
        metrics,
        limits,
        max_queued_tokens=model.max_num_queued_tokens,
        caches_prefixes=model.enable_prefix_caching,
    )


def engine_environment(config: Config) -> dict[str, str]:
    """Return this process's environment without the API keys, which engines do not need, and with CUDA's settings.

    GPUs are numbered as NVML numbers them. torch's allocator uses expandable segments, so that allocations of different
    sizes leave no gaps; it does not allocate pools.
    """
    keys = {*config.node.key_variables, config.node.admin_key_env}
    settings = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return settings | {name: value for name, value in os.environ.items() if name not in keys}
