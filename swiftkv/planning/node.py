"""The sizes of all models of a node together, from `config.json` files alone. Nothing is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from swiftkv.config import Config
from swiftkv.errors import ConfigError
from swiftkv.model_config import ModelConfig
from swiftkv.planning.lending import BorrowerRoom, plan_lending
from swiftkv.planning.models import ModelPlan, SizedPlan, plan_model, pool_too_small


def plan_node(config: Config, need_weights: bool) -> tuple[ModelPlan, ...]:
    """Size every model of `config`, in its order.

    `need_weights`: the checkpoints must be complete, as for serving. Raises `ConfigError`, one line per mistake.
    """
    plans: list[ModelPlan] = []
    mistakes = []
    for i, model in enumerate(config.models):
        try:
            plans.append(plan_model(model, config, need_weights))
        except ConfigError as error:
            mistakes.append(f"models[{i}].{error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    rooms = {room.borrower.name: room for room in plan_lending(plans)}
    for i, (plan, model) in enumerate(zip(plans, config.models, strict=True)):
        if isinstance(plan, SizedPlan):  # for other plans, the engine finds out at its start which lengths fit
            try:
                plans[i] = _with_max_model_len(plan, model, rooms.get(plan.name) or BorrowerRoom(plan, ()))
            except ConfigError as error:
                mistakes.append(f"models[{i}].{error}")
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    return tuple(plans)


def plan_one_more(config: Config, plans: Sequence[ModelPlan]) -> ModelPlan:
    """Size the last model of `config`, for serving. The other models run already, as `plans` say.

    Raises `ConfigError` that begins with the key below the model.
    """
    model = config.models[-1]
    plan = plan_model(model, config, need_weights=True)
    if not isinstance(plan, SizedPlan):
        return plan
    rooms = {room.borrower.name: room for room in plan_lending([*plans, plan])}
    return _with_max_model_len(plan, model, rooms.get(plan.name) or BorrowerRoom(plan, ()))


def _with_max_model_len(plan: SizedPlan, model: ModelConfig, room: BorrowerRoom) -> SizedPlan:
    """Return `plan` with the `max_model_len` that fits in its pool and the memory that the budgets promise it.

    Raises `ConfigError` that begins with the key below the model.
    """
    asked = model.max_model_len
    if asked is None or asked <= room.sequence_tokens:
        return replace(plan, max_model_len=asked or room.longest_context)
    if not room.lent_bytes:
        raise pool_too_small(model, plan.division, plan.pool_tokens)
    lenders = ", ".join(dict.fromkeys(pair.lender.name for pair in room.pairs if pair.num_extents))
    raise ConfigError(
        f"max_model_len: {asked} is more than the {room.sequence_tokens} tokens that fit: kv_cache.memory holds "
        f"{plan.pool_tokens}, and the memory that {lenders} may lend holds the rest; lower it, or raise "
        "kv_cache.memory or a worker's lending.budget"
    )
