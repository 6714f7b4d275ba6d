"""NVML and CUDA agree about this machine."""

from __future__ import annotations

import pytest
import torch

from swiftkv.transport.topology import choose_transport, read_topology

pytestmark = pytest.mark.gpu


def test_the_gpus_that_cuda_sees() -> None:
    topology = read_topology()
    count = torch.cuda.device_count()
    assert [gpu.name for gpu in topology.gpus] == [torch.cuda.get_device_name(index) for index in range(count)]
    assert [gpu.uuid for gpu in topology.gpus] == [
        f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(count)
    ]


def test_a_pair_that_gets_peer_copies_can_have_them() -> None:
    topology = read_topology()
    for lender in range(torch.cuda.device_count()):
        for borrower in range(torch.cuda.device_count()):
            choice = choose_transport(f"cuda:{lender}", f"cuda:{borrower}", topology)
            can = lender == borrower or torch.cuda.can_device_access_peer(borrower, lender)
            assert (choice.kind == "peer") == can, choice.reason
