"""Checks that the devices of a configuration exist and can be used."""

from __future__ import annotations

from swiftkv.config import Config
from swiftkv.errors import ConfigError
from swiftkv.transport.topology import OLDEST_CAPABILITY, Topology, read_topology


def check_devices(config: Config) -> None:
    """Raise `ConfigError` for a device that does not exist, or that this installation cannot use."""
    if all(model.device == "cpu" for model in config.models):
        return
    import torch  # a node of CPU models does without

    count = torch.cuda.device_count()
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} was built without CUDA; install one with it (make setup TORCH=torch)"
    elif count:
        why = f"the last GPU is cuda:{count - 1}; write one that is there"
    else:
        why = f"CUDA finds no GPU: {read_topology().absence or 'the driver is too old, or broken'}; see nvidia-smi"
    mistakes = [
        f"models[{i}].device: cuda:{model.last_gpu} cannot be used: {why}, or write cpu"
        for i, model in enumerate(config.models)
        if model.last_gpu >= count
    ]
    mistakes = mistakes or too_old(config, read_topology())
    if mistakes:
        raise ConfigError("\n".join(mistakes))


def too_old(config: Config, topology: Topology) -> list[str]:
    """Return the mistakes of models whose GPUs are too old for the kernels."""
    return [
        f"models[{i}].device: cuda:{index} ({gpu.name}) has compute capability {gpu.capability / 10}, and the kernels "
        f"need {OLDEST_CAPABILITY / 10} (Ampere) or more; write a newer GPU, or cpu"
        for i, model in enumerate(config.models)
        for index, gpu in enumerate(topology.gpus)
        if model.last_gpu - model.tensor_parallel_size < index <= model.last_gpu and gpu.capability < OLDEST_CAPABILITY
    ]
