"""Checks that the devices are there which a configuration names."""

from __future__ import annotations

from swiftkv.config import Config
from swiftkv.errors import ConfigError
from swiftkv.transport.topology import read_topology


def check_devices(config: Config) -> None:
    """Raises `ConfigError` for a device that is not there, or that this installation cannot use."""
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
    if mistakes:
        raise ConfigError("\n".join(mistakes))
