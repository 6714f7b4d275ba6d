"""Every byte of every pool is as plain torch leaves it after the same runs, whether it should move or not."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv.kernels import triton_copy
from swiftkv.kernels.host_copies import upload
from tests.support.runs import LayerMoves, layer_moves, move_blocks_reference

# Where triton is imported before the interpreter is switched on: compiled for a GPU that need not be there.
COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from swiftkv.kernels.triton_copy import _move
for is_even in (True, False):
    source = ASTSource(
        _move,
        {"pool": "*i32", "packed": "*i64", "index": "i32", "layer": "i32", "width": "i32"},
        {"TILE_WORDS": 4096, "IS_EVEN": is_even, "TO_PEER": True, "WORDS_PER_VECTOR": 4, "HEADER_FIELDS": 2,
         "BLOCK_FIELDS": 3},
        attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
    )
    assembly = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    print(assembly.count("ld.global.v4.b32"), assembly.count("st.global.v4.b32"), assembly.count(".global.b32"))
"""


def move(
    moves: LayerMoves, pool: torch.Tensor, peers: dict[int, torch.Tensor], max_programs: int, extra_blocks: int
) -> None:
    distances = {link: peer.data_ptr() - pool.data_ptr() for link, peer in peers.items()}
    blocks = triton_copy.flatten_runs(moves.runs, moves.width_bytes, moves.block_bytes, distances)
    other = np.full((3, triton_copy.BLOCK_FIELDS), -1)
    packed = upload(triton_copy.pack_lists([other[:1], blocks, other]), pool.device)
    most_blocks = len(blocks) + extra_blocks
    triton_copy.move_blocks(pool, packed, 1, most_blocks, moves.width_bytes, moves.layer, moves.to_peer, max_programs)


@settings(max_examples=40)
@given(
    moves=layer_moves(),
    max_programs=st.integers(0, 3),
    extra_blocks=st.integers(-1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_as_the_reference(moves: LayerMoves, max_programs: int, extra_blocks: int, seed: int) -> None:
    """One of the lists in the array is copied, and all of it, whatever grid was chosen."""
    pool, peers = moves.pools(torch.Generator().manual_seed(seed))
    expected_pool, expected_peers = pool.clone(), {link: peer.clone() for link, peer in peers.items()}
    move_blocks_reference(
        expected_pool, expected_peers, moves.runs, moves.width_bytes, moves.block_bytes, moves.layer, moves.to_peer
    )
    move(moves, pool, peers, max_programs, extra_blocks if len(moves.runs) > 1 else abs(extra_blocks))
    assert torch.equal(pool, expected_pool)
    for link, peer in peers.items():
        assert torch.equal(peer, expected_peers[link])


def test_the_reference_by_hand() -> None:
    """Layer 1, of 16 bytes, of the peer's blocks 1 and 2 goes to slots 0 and 1, of its block 0 to our block 2."""
    pool, peer = torch.zeros(4 * 32, dtype=torch.uint8), torch.arange(3 * 32, dtype=torch.uint8)
    runs = np.array([[5, 32, 0, 2, 1], [5, 0, 64, 1, 0]], np.int64)
    move_blocks_reference(pool, {5: peer}, runs, 16, 32, layer=1, to_peer=False)
    moved = {0: 48, 16: 80, 80: 16}  # ours: theirs
    expected = torch.zeros_like(pool)
    for ours, theirs in moved.items():
        expected[ours : ours + 16] = torch.arange(theirs, theirs + 16)
    assert torch.equal(pool, expected)


def test_nothing_to_move_is_no_launch() -> None:
    blocks = triton_copy.flatten_runs(np.empty((0, 5), np.int64), 64, 128, {})
    assert blocks.shape == (0, triton_copy.BLOCK_FIELDS)
    packed = torch.from_numpy(triton_copy.pack_lists([blocks]))
    triton_copy.move_blocks(torch.zeros(16, dtype=torch.uint8), packed, 0, 0, 64, 0, to_peer=True)


@pytest.mark.parametrize("runs", [[[0, 8, 0, 1, 0]], [[0, 0, 24, 1, 1]]])
def test_what_vectors_cannot_move_is_refused(runs: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="multiples of 16"):
        triton_copy.flatten_runs(np.array(runs, np.int64), 64, 128, {0: 0})


def test_a_link_that_is_not_attached_is_refused() -> None:
    with pytest.raises(KeyError):
        triton_copy.flatten_runs(np.array([[3, 0, 0, 1, 0]], np.int64), 64, 128, {0: 0})


def test_compiled_for_a_gpu_a_thread_moves_16_bytes_at_a_time() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["4", "4", "0"] * 2
