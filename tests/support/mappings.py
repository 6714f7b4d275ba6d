"""Reads what Linux says of this process's memory mappings."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Mapping:
    """One mapping, with all of its lines in `/proc/self/smaps`: `Rss` is `["12", "kB"]`, `VmFlags` a list of flags."""

    begin: int
    end: int
    permissions: str  # as "rw-s"
    file: str  # empty if it has no name
    values: dict[str, list[str]] = field(default_factory=dict)

    @property
    def resident_bytes(self) -> int:
        return int(self.values["Rss"][0]) << 10


def mappings() -> list[Mapping]:
    """Return all mappings of this process."""
    found: list[Mapping] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *values = line.split()
        if first.endswith(":"):
            found[-1].values[first[:-1]] = values
        else:  # addresses, permissions, offset, device, inode and a name, which may have spaces
            begin, end = (int(address, 16) for address in first.split("-"))
            found.append(Mapping(begin, end, values[0], " ".join(values[4:])))
    return found


def mapping_of(address: int) -> Mapping:
    """Return the mapping that has `address`."""
    return next(each for each in mappings() if each.begin <= address < each.end)


def resident_bytes_of(part_of_name: str) -> int:
    """Return the bytes in memory of all mappings whose file's name has `part_of_name`."""
    return sum(each.resident_bytes for each in mappings() if part_of_name in each.file)
