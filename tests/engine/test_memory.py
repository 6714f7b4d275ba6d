"""The arithmetic of device memory, and that its errors show it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv.engine.memory import RUNTIME_BYTES, DeviceUse, kv_bytes_on_device, runtime_bytes
from swiftkv.engine.serving import exit_code
from swiftkv.errors import ConfigError, NoRoomError
from swiftkv.supervisor import end_of
from swiftkv.units import DeviceShare, PoolBytes

GIB = 1 << 30
USE = DeviceUse(weights_bytes=16 * GIB, activation_bytes=2 * GIB, graph_bytes=GIB, runtime_bytes=GIB)


def test_bytes_are_what_was_asked_for() -> None:
    assert kv_bytes_on_device(PoolBytes(60 * GIB), 80 * GIB, USE, GIB) == 60 * GIB


def test_a_fraction_is_of_the_device_and_for_the_whole_engine() -> None:
    assert kv_bytes_on_device(DeviceShare.of(Fraction(1, 2)), 80 * GIB, USE, GIB) == 20 * GIB


def test_bytes_that_do_not_fit_show_the_sum() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_bytes_on_device(PoolBytes(60 * GIB + 1), 80 * GIB, USE, GIB)
    assert str(caught.value) == (
        "kv_cache.memory: KV 60.00 GiB + weights 16.00 GiB + activations 2.00 GiB + CUDA graphs 1.00 GiB + "
        "runtime 1.00 GiB = 80.00 GiB, but the device has only 80.00 GiB"
    )


def test_a_fraction_that_leaves_too_little_shows_what_it_leaves() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_bytes_on_device(DeviceShare.of(Fraction(1, 5)), 80 * GIB, USE, 3 * GIB)
    assert str(caught.value) == (
        "kv_cache.memory: 20% of 80.00 GiB is 16.00 GiB; minus weights 16.00 GiB + activations 2.00 GiB + CUDA graphs "
        "1.00 GiB + runtime 1.00 GiB leaves -4.00 GiB for KV, but one sequence of max_model_len needs 3.00 GiB"
    )


def test_too_little_for_one_sequence() -> None:
    with pytest.raises(ConfigError, match=r"2\.00 GiB are less than the 3\.00 GiB that one sequence"):
        kv_bytes_on_device(PoolBytes(2 * GIB), 80 * GIB, USE, 3 * GIB)


@pytest.mark.parametrize("memory", [Fraction(0), Fraction(-1, 2), Fraction(11, 10)])
def test_a_fraction_is_a_part(memory: Fraction) -> None:
    with pytest.raises(ConfigError, match="part of the device"):
        kv_bytes_on_device(DeviceShare.of(memory), 80 * GIB, USE, 0)


def test_what_the_libraries_hold_counts_where_it_is_more_than_what_is_set_aside() -> None:
    assert runtime_bytes(None) == runtime_bytes(GIB // 2) == RUNTIME_BYTES
    assert runtime_bytes(2 * GIB) > 2 * GIB


def test_an_engine_without_room_is_started_again() -> None:
    """The pool of an engine that died may stay until its borrowers have let go."""
    no_room = end_of(exit_code(NoRoomError("kv_cache.memory: cuda:0 has no room")))
    assert no_room.can_restart
    assert no_room.how == "found no room for the model"
    too_little = end_of(exit_code(ConfigError("kv_cache.memory: too little")))
    assert not too_little.can_restart
    assert too_little.how == "could not load the model"


@given(
    shares=st.lists(st.fractions(Fraction(1, 100), 1), min_size=1, max_size=4),
    device_bytes=st.integers(GIB, 200 * GIB),
    use=st.builds(DeviceUse, *[st.integers(0, 4 * GIB)] * 4),
)
def test_engines_whose_parts_add_up_fit_the_device(shares: list[Fraction], device_bytes: int, use: DeviceUse) -> None:
    total = sum(shares)
    taken = 0
    for share in shares:
        try:
            taken += kv_bytes_on_device(DeviceShare.of(share / total), device_bytes, use, 1) + use.total_bytes
        except ConfigError:
            return
    assert device_bytes - len(shares) < taken <= device_bytes
