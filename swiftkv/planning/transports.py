"""Chooses the transports over which the engines of a node lend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swiftkv.config import Config
from swiftkv.planning.lending import lending_pairs
from swiftkv.planning.models import ModelPlan
from swiftkv.transport.topology import TransportChoice, node_transports, read_topology


def lending_transports(config: Config, plans: Sequence[ModelPlan]) -> dict[str, TransportChoice]:
    """Return the transport of each kind of memory. Raises what `node_transports` raises."""
    pairs = _device_pairs(plans)
    return node_transports(config.node.lending.transport, pairs, read_topology() if _use_gpus(pairs) else None)


def describe_transports(config: Config, plans: Sequence[ModelPlan]) -> Iterator[tuple[str, str]]:
    """Yield each kind of memory with its transport and the reason for it.

    Without a GPU here, say that only the machine with the GPUs can choose.
    """
    pairs = _device_pairs(plans)
    topology = read_topology() if _use_gpus(pairs) else None
    if topology is not None and not topology.gpus:
        yield "GPUs", f"a transport that only the machine with the GPUs can choose ({topology.absence})"
        pairs = [pair for pair in pairs if pair == ("cpu", "cpu")]
    for memory, choice in node_transports(config.node.lending.transport, pairs, topology).items():
        yield memory, f"{choice.kind}: {choice.reason}"


def _device_pairs(plans: Sequence[ModelPlan]) -> list[tuple[str, str]]:
    """Return a lender's device and a borrower's for each pair that any budget could use."""
    return [(pair.lender.device, pair.borrower.device) for pair in lending_pairs(plans)]


def _use_gpus(pairs: Sequence[tuple[str, str]]) -> bool:
    return any(device != "cpu" for pair in pairs for device in pair)
