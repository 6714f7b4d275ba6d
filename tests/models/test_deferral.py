"""Layers whose kernels wait for each other give what they give one kernel at a time, in every architecture."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from swiftkv.models import decoder as decoder_module
from swiftkv.models.loader import MappedWeights, load_decoder
from swiftkv.models.registry import read_config
from tests.support.checkpoints import ARCHITECTURES, make_checkpoint
from tests.support.paged import PagedRunner

PROMPTS = {name: torch.randint(64, (60,), generator=torch.Generator().manual_seed(3)).tolist() for name in "ab"}
CHUNKS = [7, 1, 1, 20, 1]
AT_ONCE = {"mimo"}  # its layers scale values in torch, between the kernels


@torch.inference_mode()
@pytest.mark.usefixtures("needs_cpu_ops")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_deferred_layers_give_the_same_bits(architecture: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, architecture)
    decoder = load_decoder(read_config(tmp_path), MappedWeights(tmp_path), torch.bfloat16, "cpu", 128)
    deferred = mock.Mock(wraps=decoder.ops.deferred)
    with mock.patch.object(decoder.ops, "deferred", deferred), mock.patch.object(decoder_module, "_FEW_TOKENS", 10):
        got = PagedRunner(decoder).run(PROMPTS, CHUNKS)
        assert deferred.called == (architecture not in AT_ONCE)
        deferred.reset_mock()
        with mock.patch.object(decoder, "_is_deferrable", False):
            wanted = PagedRunner(decoder).run(PROMPTS, CHUNKS)
        assert not deferred.called
    for name in PROMPTS:
        assert torch.equal(got[name], wanted[name])
