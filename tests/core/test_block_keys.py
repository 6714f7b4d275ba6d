"""Block keys against the reference implementation of BLAKE3."""

from __future__ import annotations

import blake3
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv import _core


def reference_keys(namespace: bytes, tokens: np.ndarray, block_size: int) -> list[bytes]:
    keys, parent = [], blake3.blake3(namespace).digest()
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = blake3.blake3(tokens[start : start + block_size].astype("<i4").tobytes(), key=parent).digest()
        keys.append(parent)
    return keys


# Around every border of the format: 64-byte blocks, 1024-byte chunks, and trees that are not complete.
@pytest.mark.parametrize(
    "length", [0, 1, 3, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 2048, 2049, 3072, 3073, 5120, 7169, 16384, 31744]
)
def test_blake3_equals_the_reference(length: int) -> None:
    data = bytes(i % 251 for i in range(length))
    assert _core.blake3(data) == blake3.blake3(data).digest()


@given(st.binary(max_size=5000))
def test_blake3_equals_the_reference_on_any_bytes(data: bytes) -> None:
    assert _core.blake3(data) == blake3.blake3(data).digest()


@pytest.mark.parametrize("block_size", [1, 15, 16, 32, 48, 256, 272, 1024])
@pytest.mark.parametrize("namespace", [b"", b"model|adapter|salt"])
def test_keys_are_chained_keyed_hashes(block_size: int, namespace: bytes) -> None:
    tokens = np.random.default_rng(block_size).integers(0, 2**31 - 1, 3 * block_size + block_size // 2, dtype=np.int32)
    keys = _core.block_keys(namespace, tokens, block_size)
    expected = reference_keys(namespace, tokens, block_size)
    assert len(expected) == 3
    assert keys == b"".join(expected)


def test_a_key_depends_on_everything_before_it() -> None:
    tokens = np.arange(64, dtype=np.int32)
    changed = tokens.copy()
    changed[3] += 1
    last = [_core.block_keys(ns, t, 16)[-32:] for ns, t in [(b"a", tokens), (b"b", tokens), (b"a", changed)]]
    assert len(set(last)) == 3


def test_block_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_size"):
        _core.block_keys(b"", np.arange(4, dtype=np.int32), 0)
