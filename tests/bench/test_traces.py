"""Traces as they are published, and what is wrong with other files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swiftkv.bench.datasets import DatasetError
from swiftkv.bench.traces import Arrival, read_trace, spread_ties

MOONCAKE = """\
{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}
{"timestamp": 0, "input_length": 512, "output_length": 2, "hash_ids": [0]}
"""
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,1000,10
2023-11-16 18:17:05.4799600,3,8
"""


def test_mooncakes_ids_say_which_prompts_begin_alike(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    first, second = read_trace(path)
    assert (first, second) == (Arrival(0.0, 512, 2, (0,)), Arrival(3.0, 600, 5, (0, 7)))
    assert second.prompt().shape == (600,)
    assert (second.prompt()[:512] == first.prompt()).all()
    assert set(second.prompt()[512:].tolist()) == {7}


def test_azures_prompts_are_all_different(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE)
    first, second = read_trace(path)
    assert (first.time_s, second.time_s) == (0.0, pytest.approx(1.5))
    assert (first.input_tokens, first.output_tokens, second.input_tokens) == (1000, 10, 3)
    assert not set(first.prompt().tolist()) & set(second.prompt().tolist())


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", "{}\n"), ("a.jsonl", "no"), ("a.csv", "a,b\n1,2\n"), ("a.csv", "")]
)
def test_other_files(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DatasetError):
        read_trace(tmp_path / name)
    with pytest.raises(DatasetError, match=r"cannot read .*missing.csv: No such file or directory"):
        read_trace(tmp_path / "missing.csv")


SECOND_LINES = {
    "input_length": ["1e99", '"x"', "-1", "0", "1000000000000"],
    "output_length": ['"x"', "-3", "null", "1.5"],
    "timestamp": ["-1", '"now"', "null"],
    "hash_ids": ["3", '["a"]', "[1000000000000]", "[-1]"],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in SECOND_LINES.items() for value in values])
def test_a_value_that_cannot_be_is_named_with_its_line(tmp_path: Path, key: str, value: str) -> None:
    first, _ = MOONCAKE.splitlines()
    good = {"timestamp": "1", "input_length": "8", "output_length": "2", "hash_ids": "[1]"}
    path = tmp_path / "a.jsonl"
    for entries in (good | {key: value}, {name: text for name, text in good.items() if name != key}):
        second = ", ".join(f'"{name}": {text}' for name, text in entries.items())
        path.write_text(f"{first}\n{{{second}}}\n")
        with pytest.raises(DatasetError, match=rf"{path} is not a trace .*: line 2: .*{key}"):
            read_trace(path)


def test_a_timestamp_that_is_no_number_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(MOONCAKE.replace("3000", "NaN"))
    with pytest.raises(DatasetError, match=r"line 1: JSON is malformed"):
        read_trace(path)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("2023-11-16 18:17:05.4799600,3", "GeneratedTokens"),
        ("2023-11-16 18:17:05.4799600,-3,8", "ContextTokens"),
        ("2023-11-16 18:17:05.4799600,3,many", "GeneratedTokens"),
        ("yesterday,3,8", "yesterday"),
    ],
)
def test_a_row_that_cannot_be_is_named(tmp_path: Path, row: str, why: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{AZURE}{row}\n")
    with pytest.raises(DatasetError, match=rf"{path} is not a trace .*: line 4: .*{why}"):
        read_trace(path)


def test_lines_may_be_blank_and_ids_stand_for_the_whole_prompt(tmp_path: Path) -> None:
    path = tmp_path / "a.JSONL"
    path.write_text(f"\n{MOONCAKE}\n")
    assert len(read_trace(path)) == 2
    path.write_text(MOONCAKE.replace("600", "3000"))
    with pytest.raises(DatasetError, match="line 1: 2 hash_ids do not stand for input_length 3000"):
        read_trace(path)


def test_times_may_have_a_zone_and_any_number_of_digits(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(AZURE.replace("05.4799600", "05+00:00").replace("03.9799600", "03.9799600+00:00"))
    assert [arrival.time_s for arrival in read_trace(path)] == [0.0, pytest.approx(1.02004)]


def test_requests_of_one_instant_are_spread_until_the_next() -> None:
    arrivals = [Arrival(time_s, index, 1, ()) for index, time_s in enumerate([0.0, 0.0, 0.0, 3.0, 6.0, 6.0])]
    spread = spread_ties(arrivals, np.random.default_rng(1))
    times_s = {arrival.input_tokens: arrival.time_s for arrival in spread}
    assert len({times_s[0], times_s[1], times_s[2]}) == 3
    assert all(0 <= times_s[index] < 3 for index in range(3))
    assert (times_s[3], times_s[4], times_s[5]) == (3.0, 6.0, 6.0)  # nothing says how long the last instant was
    assert [arrival.time_s for arrival in spread] == sorted(times_s.values())
    assert spread == spread_ties(arrivals, np.random.default_rng(1))
