"""The keys and values that kernels and models make are those that stored blocks of this version have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kv_digests
import pytest

from swiftkv import _cpu
from swiftkv.tier.keys import KV_VERSION
from tests.support.checkpoints import make_checkpoint

ISAS = ("avx2", "avx512", "avx512_bf16", "amx_emulated", "amx")  # a processor with one has those before it
FLOAT16 = ("ff14f3882b3afcd0", "72a5a582fdb092c3", "08c1045b956fa412", "14b3d752ab016804")
BFLOAT16 = {
    "avx2": ("ded798d5559ad25e", "6dfb00447e0304c7", "2600e1da5467900a", "fd5274cd21bde49f"),
    "avx512": ("ded798d5559ad25e", "6dfb00447e0304c7", "2600e1da5467900a", "fd5274cd21bde49f"),
    "avx512_bf16": ("ddebcb8032afb0ca", "6b9ae3fad6c98072", "c76a5c0cd124bb7d", "36606d9be4368ab5"),
    "amx": ("a65f978447ebdfca", "028e34da70d93c0c", "a823d33d2251eb47", "45380e3681625d32"),
}
OF_VERSION = 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("kv-bytes")
    for architecture in kv_digests.ARCHITECTURES:
        make_checkpoint(directory / architecture, architecture)
        kv_digests.make_numbers_plain(directory / architecture)
    return directory


@pytest.mark.parametrize("isa", ["avx2", *(pytest.param(isa, marks=pytest.mark.slow) for isa in ISAS[1:])])
def test_no_byte_of_a_block_has_changed(isa: str, directory: Path) -> None:
    """Storage would mix blocks of two versions. If a byte has changed, raise KV_VERSION, and note the new digests."""
    if ISAS.index(isa) > ISAS.index({"avx512_bf16": "amx_emulated"}.get(_cpu.supported_isa(), _cpu.supported_isa())):
        pytest.skip(f"this processor has no {isa}")
    environment = {**os.environ, "SWIFTKV_CPU_ISA": isa, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, kv_digests.__file__, str(directory)]
    instructions, *lines = subprocess.check_output(command, env=environment, text=True).splitlines()
    instructions = instructions.removeprefix("instructions ")
    assert instructions == isa.removesuffix("_emulated")
    found = {tuple(line.split()[:2]): line.split()[2] for line in lines}
    for dtype, expected in (("float16", FLOAT16), ("bfloat16", BFLOAT16[instructions])):
        assert tuple(found[architecture, dtype] for architecture in kv_digests.ARCHITECTURES) == expected
    assert KV_VERSION == OF_VERSION
