"""Mappings of shared memory: where they begin, what they cost before they are used, and when they end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from swiftkv.shared_memory import HUGE_PAGE_BYTES, PlacedMemory, address_of, make_memory, map_memories, map_memory
from tests.support.mappings import mappings

LARGE_BYTES = 64 << 30  # none of it is touched

MAPS_A_GIBIBYTE_WITH_NO_MEMORY_TO_SPARE = """
import resource
from swiftkv.shared_memory import make_memory, map_memory
fd = make_memory("trial", 1 << 30)
resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, 256 << 20))
memory = map_memory(fd, 1 << 30)
memory[-1] = 7
print(memory[-1], memory[0])
"""


def test_a_mapping_is_the_memory_and_begins_at_a_huge_page() -> None:
    fd = make_memory("trial", 3 * HUGE_PAGE_BYTES + 5)
    one, other = map_memory(fd, 3 * HUGE_PAGE_BYTES + 5), map_memory(fd, 9)
    one[0], one[-1], other[8] = 1, 2, 3
    assert (other[0], one[8], os.pread(fd, 2, 3 * HUGE_PAGE_BYTES + 4)) == (1, 3, b"\2")
    assert address_of(one) % HUGE_PAGE_BYTES == address_of(other) % HUGE_PAGE_BYTES == 0
    os.close(fd)


def test_a_mapping_and_its_reserve_end_with_the_last_view() -> None:
    before_bytes = address_space_bytes()
    fd = make_memory("trial", LARGE_BYTES)
    memory = map_memory(fd, LARGE_BYTES)
    os.close(fd)
    part = memory[5:]
    del memory
    part[0] = 1
    assert address_space_bytes() >= before_bytes + LARGE_BYTES
    del part
    assert address_space_bytes() < before_bytes + LARGE_BYTES // 2


def test_the_reserve_counts_as_no_memory() -> None:
    """A kernel that promises no more memory than it has counts private memory before it is touched."""
    command = [sys.executable, "-c", MAPS_A_GIBIBYTE_WITH_NO_MEMORY_TO_SPARE]
    assert subprocess.check_output(command, text=True) == "7 0\n"


def test_what_cannot_be_mapped_is_an_error_and_leaves_nothing() -> None:
    before_bytes = address_space_bytes()
    fd = os.open("/dev/null", os.O_RDWR)
    with pytest.raises(OSError, match="No such device"):
        map_memory(fd, LARGE_BYTES)
    os.close(fd)
    assert address_space_bytes() < before_bytes + LARGE_BYTES // 2


def test_memories_lie_in_one_range_with_holes_that_nobody_may_touch() -> None:
    before_bytes = address_space_bytes()
    one, other = make_memory("one", 5), make_memory("other", HUGE_PAGE_BYTES)
    memory = map_memories([PlacedMemory(one, 5), PlacedMemory(other, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES)])
    assert memory.nbytes == 4 * HUGE_PAGE_BYTES
    memory[4], memory[-1] = 1, 2
    assert os.pread(one, 1, 4) + os.pread(other, 1, HUGE_PAGE_BYTES - 1) == b"\1\2"
    begin = address_of(memory)
    hole = next(each for each in mappings() if each.begin <= begin + HUGE_PAGE_BYTES < each.end)
    assert (hole.begin, hole.end) == (begin + os.sysconf("SC_PAGE_SIZE"), begin + 3 * HUGE_PAGE_BYTES)
    assert hole.permissions == "---p"
    os.close(one)
    os.close(other)
    del memory
    assert address_space_bytes() <= before_bytes + HUGE_PAGE_BYTES


def address_space_bytes() -> int:
    return sum(each.end - each.begin for each in mappings())
