"""docs/api.md says what the code takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftkv.server.field_tables import field_tables, with_tables

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"


def test_the_document_has_the_tables_of_the_code() -> None:
    text = DOCUMENT.read_text()
    assert text == with_tables(text), "run: python -m swiftkv.server.field_tables docs/api.md"


@pytest.mark.parametrize(
    "row",
    [
        "| `temperature` | supported | a number from 0 to 100 |",
        "| `user` | accepted without effect | text, up to 1,024 characters |",
        "| `best_of` | refused | only `1` |",
        "| `messages` | required | a list, up to 4,096, of: a message |",
        "| `input` | required | text; or a list, up to 4,096, of: see below |",
        "| `strict` | accepted without effect | true or false |",
        "| `parsed` | accepted without effect | anything |",
    ],
)
def test_a_field_of_each_kind(row: str) -> None:
    assert row in field_tables().splitlines()


def test_a_document_without_markers_is_left_alone() -> None:
    with pytest.raises(ValueError, match="lacks"):
        with_tables("# Nothing here\n")
