"""Do the documents name what is there?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RELIABILITY = (ROOT / "docs" / "reliability.md").read_text()
NAMED_TESTS = sorted(set(re.findall(r"`(test_\w+)`", RELIABILITY)))
DEFINED_TESTS = frozenset(
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^\s*(?:async )?def (test_\w+)\(", file.read_text(), re.MULTILINE)
)


@pytest.mark.parametrize("name", NAMED_TESTS)
def test_what_reliability_says_is_shown_by_a_test_that_exists(name: str) -> None:
    assert name in DEFINED_TESTS


def test_every_fault_has_a_test() -> None:
    """Each row of the table of what can go wrong names at least one."""
    table = RELIABILITY.partition("## What can go wrong")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| **", "| ---"))]
    assert len(rows) > 20
    assert [row for row in rows[1:] if "`test_" not in row] == []
