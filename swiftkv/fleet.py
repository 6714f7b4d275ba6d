"""The models of a node: what each is made of, from its configuration to the supervisor of its engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swiftkv.config import Config, ModelConfig
from swiftkv.engine.messages import EngineConfig
from swiftkv.engine_configs import compile_engines, why_not_lend
from swiftkv.planning.models import ModelPlan, SizedPlan
from swiftkv.planning.node import plan_one_more
from swiftkv.planning.transports import lending_transports
from swiftkv.server.client import EngineClient
from swiftkv.server.lending import CoordinatorClient, LendingMember, NodeLending
from swiftkv.server.metrics import GatewayMetrics
from swiftkv.server.sleep import Sleeper
from swiftkv.supervisor import EngineSupervisor


@dataclass(frozen=True, slots=True)
class Member:
    """One model."""

    config: ModelConfig
    plan: ModelPlan
    lenders: tuple[str, ...]  # those that its engine knows
    client: EngineClient
    coordinator: CoordinatorClient | None  # None: it has no part in lending
    supervisor: EngineSupervisor
    sleeper: Sleeper


class Fleet:
    """The models of a node, and what they have in common. To be made inside the event loop.

    An engine learns at its start who lends to it and borrows from it: a model that is added lends to, and borrows from,
    those that are started after it.
    """

    def __init__(
        self,
        config: Config,
        plans: Sequence[ModelPlan],
        *,
        ipc: Path,
        metrics: GatewayMetrics,
        say: Callable[[str], None],
    ) -> None:
        """`ipc` is the directory of the node's sockets; `say` tells something to whoever started the node."""
        self.config = config
        self.transports = lending_transports(config, plans)
        self.members: dict[str, Member] = {}
        self._ipc = ipc
        self._metrics = metrics
        self._say = say
        self._environment = engine_environment(config)
        self._numbers = {plan.name: number for number, plan in enumerate(plans)}
        kinds = sorted({choice.kind for choice in self.transports.values()})
        self.lending = NodeLending([], config.node.lending.enabled, ", ".join(kinds) or config.node.lending.transport)
        engines = compile_engines(config, plans, self.transports, ipc, self._numbers)
        for model, plan, engine in zip(config.models, plans, engines, strict=True):
            self._make(model, plan, engine)
        self._link()

    @property
    def plans(self) -> list[ModelPlan]:
        return [member.plan for member in self.members.values()]

    def plan(self, section: object) -> tuple[Config, ModelPlan]:
        """Check a model that is to be added, and size it. Starts nothing, and may take a while.

        Raises `ConfigError` that has one line per mistake.
        """
        config = self.config.with_model(section)
        return config, plan_one_more(config, self.plans)

    def add(self, config: Config, plan: ModelPlan) -> Member:
        """Make the last model of `config`, which `plan` returned with its plan."""
        plans = [*self.plans, plan]
        self._numbers.setdefault(plan.name, len(self._numbers))
        self.transports = lending_transports(config, plans) | self.transports  # those that are in use stay
        *others, engine = compile_engines(config, plans, self.transports, self._ipc, self._numbers)
        self.config = config
        for known, other in zip(self.members.values(), others, strict=True):
            if known.coordinator is not None and other.lending is not None:
                known.supervisor.meet(other.lending)
        member = self._make(config.models[-1], plan, engine)
        self._link()
        return member

    def remove(self, name: str) -> None:
        """Forget a model whose process has ended, and leave nothing of it behind."""
        member = self.members.pop(name)
        self.config = self.config.without_model(name)
        self.lending.remove(name)
        self._link()
        if member.coordinator is not None:
            member.coordinator.close()
        member.client.close()
        for left in self._ipc.glob(f"{self._numbers[name]}.*"):
            left.unlink(missing_ok=True)

    def close(self) -> None:
        """Give every socket back; the supervisors have stopped."""
        for name in list(self.members):
            self.remove(name)

    def _make(self, model: ModelConfig, plan: ModelPlan, engine: EngineConfig) -> Member:
        client = EngineClient(
            plan.name,
            engine.requests_address,
            engine.outputs_address,
            self._metrics.for_model(plan.name),
            max_in_flight=model.max_num_queued_reqs,
            max_queued_tokens=model.max_num_queued_tokens,
            weight_bytes=plan.weight_bytes,
        )
        lending = engine.lending
        coordinator = None if lending is None else CoordinatorClient(plan.name, lending.leases_address)
        supervisor = EngineSupervisor(
            engine, client, coordinator, node=self.config.node, say=self._say, environment=self._environment
        )
        self.lending.add(
            LendingMember(
                name=plan.name,
                role=plan.role,
                pool_bytes=plan.pool_bytes if isinstance(plan, SizedPlan) else 0,
                block_bytes=plan.block_bytes,
                why_not_lend=why_not_lend(self.config, plan, lending),
                engine=client,
                coordinator=coordinator,
                remember_budget=supervisor.set_lending_budget,
                budget_bytes=supervisor.lending_budget,
            )
        )
        sleeper = Sleeper(client, self.lending, supervisor.put_to_rest, can_stay=model.tensor_parallel_size == 1)
        lenders = () if lending is None else tuple(peer.name for peer in lending.lenders)
        member = Member(model, plan, lenders, client, coordinator, supervisor, sleeper)
        self.members[plan.name] = member
        return member

    def _link(self) -> None:
        """Tell each supervisor which others its engine may have to wait for."""
        for member in self.members.values():
            there = (self.members[name] for name in member.lenders if name in self.members)
            member.supervisor.lenders = [lender.supervisor for lender in there]


def engine_environment(config: Config) -> dict[str, str]:
    """Return this process's environment without the keys, for which engines have no use, and with CUDA's settings.

    GPUs are numbered as NVML numbers them, and torch's allocator may move what it holds, so that nothing is left over
    between allocations of different sizes; pools are not allocated by torch.
    """
    keys = {config.node.api_key_env, config.node.admin_key_env}
    settings = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return settings | {name: value for name, value in os.environ.items() if name not in keys}
