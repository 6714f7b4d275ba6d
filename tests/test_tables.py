"""Check that the command line's tables lose nothing on narrow terminals and in pipes."""

from __future__ import annotations

import pytest
from rich.console import Group

from swiftkv.tables import console_for, plain_table

COMMAND = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"


@pytest.mark.parametrize("columns", [10, 40, 200])
def test_no_cell_is_cut_however_narrow_the_terminal_is(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = plain_table(("", "what to do"), ("pool", "blocks in use"))
    table.add_row("chat", COMMAND, "11.99MiB", "1,365")
    view = Group(table, "", "a remark below it")
    console_for(view).print(view)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1:] == [["chat", *COMMAND.split(), "11.99MiB", "1,365"], [], ["a", "remark", "below", "it"]]


def test_a_wide_terminal_keeps_headings_and_cells_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    table = plain_table(("",), ("blocks in use", "free"))
    table.add_row("chat", "283", "85")
    console_for(table).print(table)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "      blocks in use  free",
        "chat            283    85",
    ]
