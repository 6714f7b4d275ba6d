"""A block has another name for everybody whose bytes would be others."""

from __future__ import annotations

from dataclasses import replace

from swiftkv.cache.geometry import KVGroup
from swiftkv.tier.keys import ObjectKeys, split_keys

GROUP = KVGroup((0, 1), num_kv_heads=2, head_dim=32, dtype="float32", block_size=16)
KEY = bytes(range(32))


def test_names_differ_with_all_that_the_bytes_depend_on() -> None:
    window = replace(GROUP, kind="window", window=40)
    variants = [
        ObjectKeys([GROUP], "weights", "cpu"),
        ObjectKeys([GROUP], "other weights", "cpu"),
        ObjectKeys([GROUP], "weights", "triton"),
        ObjectKeys([replace(GROUP, dtype="float16")], "weights", "cpu"),
        ObjectKeys([replace(GROUP, block_size=32)], "weights", "cpu"),
        ObjectKeys([replace(GROUP, num_kv_heads=1)], "weights", "cpu"),
        ObjectKeys([replace(GROUP, layers=(0, 2))], "weights", "cpu"),
        ObjectKeys([window], "weights", "cpu"),
    ]
    assert len({keys.of(KEY, 0) for keys in variants}) == len(variants)
    assert len({keys.fingerprint for keys in variants}) == len(variants)
    ranks = ObjectKeys([GROUP], "weights", "cpu", 2)
    names = [variants[0].of(KEY, 0), *(ranks.of(KEY, 0, rank) for rank in (0, 1))]
    assert len({*names, ObjectKeys([GROUP], "weights", "cpu", 4).of(KEY, 0)}) == 4
    assert ranks.fingerprint != variants[0].fingerprint
    both = ObjectKeys([GROUP, window], "weights", "cpu")
    assert both.of(KEY, 0) == variants[0].of(KEY, 0)
    assert both.of(KEY, 0) != both.of(KEY, 1)
    assert both.of(KEY, 0) != both.of(bytes(32), 0)
    assert len(both.of(KEY, 0)) == 32
    assert len(both.fingerprint) == 16


def test_keys_are_split() -> None:
    assert list(split_keys(KEY + bytes(32))) == [KEY, bytes(32)]
    assert not list(split_keys(b""))
