"""The check whether new files can take the place of those that a running model was started with."""

from __future__ import annotations

from swiftkv.config import Config
from swiftkv.errors import CheckpointError, ConfigError
from swiftkv.model_config import ModelConfig
from swiftkv.models.files import check_tensors
from swiftkv.models.registry import DECODERS, read_config
from swiftkv.models.weights import RankSlices
from swiftkv.planning.models import ModelPlan, plan_model


def check_replacement(model: ModelConfig, config: Config, running: ModelPlan) -> None:
    """Raise `ConfigError` unless the files that are now at the model's path can be loaded in place of the running ones.

    The running plan keeps its lengths, pool and budget. No weight is read.
    """
    plan = plan_model(model, config, need_weights=True)
    for what, here, there in (
        ("directory", plan.checkpoint.directory, running.checkpoint.directory),
        ("architecture", plan.architecture, running.architecture),
        ("KV cache", plan.groups, running.groups),
        ("vocabulary", plan.vocab_size, running.vocab_size),
    ):
        if here != there:
            raise ConfigError(f"path: the model's {what} has changed; remove the model and add it again")
    if plan.max_context_len < running.max_model_len:
        raise ConfigError(
            f"path: the model's files allow {plan.max_context_len} tokens, fewer than the {running.max_model_len} that "
            "it serves; remove the model and add it again"
        )
    directory = plan.checkpoint.directory
    decoder = read_config(directory, model.task)
    weights = DECODERS[decoder.architecture].weights(decoder, RankSlices.of(decoder, 0, 1))
    try:
        check_tensors(directory, weights, decoder.qweights)
    except CheckpointError as error:
        raise ConfigError(f"path: {error}") from None
