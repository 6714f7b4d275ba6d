"""The tables in which a node's engines keep the accounts of the time that they share: of the cores, and of each GPU.

Only engines read and write it (`cpp_ext/cpu/shares.h`). The node makes them and gives each engine an account;
when an engine dies, the node need not do anything.
"""

from __future__ import annotations

import os
from typing import Self

from swiftkv.shared_memory import make_memory

_NUM_BYTES = 8192
_NUM_ACCOUNTS = 63


class ShareTable:
    """The table, and which engine has which of its accounts."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """The descriptor that is passed on to every engine."""
        self._free = list(range(_NUM_ACCOUNTS))

    @classmethod
    def create(cls) -> Self:
        return cls(make_memory("shares", _NUM_BYTES))  # all zeros: no account is open

    def take_account(self) -> int | None:
        """Return the number of a free account, or `None` if there is none left."""
        return self._free.pop(0) if self._free else None

    def give_back(self, account: int) -> None:
        """Free the account of a model whose process has ended."""
        self._free.append(account)

    def close(self) -> None:
        """Close the descriptor. The memory is freed when the last engine ends."""
        os.close(self.fd)
