"""Output that nobody reads is dropped, and nobody waits for it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from swiftkv.output import DetachedStream

DEADLINE_S = 60.0


def test_what_is_written_arrives_in_order() -> None:
    reader, writer = os.pipe()
    stream = DetachedStream(writer, patience_s=DEADLINE_S)
    for number in range(1000):
        print(number, file=stream)
    stream.flush()
    assert os.read(reader, 1 << 16).decode().split() == [str(number) for number in range(1000)]
    assert stream.fileno() == writer


def test_a_reader_that_stalls_is_not_waited_for_and_is_told_what_it_missed() -> None:
    reader, writer = os.pipe()
    stream = DetachedStream(writer, patience_s=0.05)
    for number in range(20_000):  # more than the pipe and the queue hold
        stream.write(f"{number:99}\n")
        stream.flush()
    received = b""
    lines = threading.Event()

    def read() -> None:
        nonlocal received
        while b"were lost here" not in received:
            received += os.read(reader, 1 << 16)
            stream.write("again\n")
        lines.set()

    threading.Thread(target=read, daemon=True).start()
    assert lines.wait(DEADLINE_S)
    first = received.split(b"[")[0].split()
    assert first[:100] == [str(number).encode() for number in range(100)]


def test_a_full_disk_raises_nothing() -> None:
    with open("/dev/full", "wb") as full:
        stream = DetachedStream(full.fileno(), patience_s=DEADLINE_S)
        for _ in range(10):
            print("lost", file=stream)
        stream.drain(DEADLINE_S)


FULL_FOR_A_WHILE = """
import os, resource, sys
from swiftkv.output import DetachedStream

told = []
stream = DetachedStream(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT), 60.0, mark=b"%d lost\\n", on_lost=told.append)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
for limit in (7, most):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
    for _ in range(3):
        stream.write("line\\n")
    stream.drain(60.0)
print(len(told), told[0].strerror)
"""


def test_a_line_that_was_cut_off_ends_before_the_next_and_the_first_loss_is_told(tmp_path: Path) -> None:
    file = tmp_path / "log"
    command = [sys.executable, "-c", FULL_FOR_A_WHILE, file]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout
    assert file.read_text().splitlines() == ["line", "li", "2 lost", "line", "line", "line"]
    assert told == "1 File too large\n"


def test_a_process_that_ends_waits_for_no_thread_that_has_ended_before_it() -> None:
    program = "from swiftkv.output import detach_output; detach_output(3600.0); print('a last word')"
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stdout) == (0, "a last word\n")


def test_characters_that_standard_output_does_not_have() -> None:
    """A file system takes any bytes as a name, and a terminal need not know UTF-8."""
    program = (
        "from swiftkv.output import failures_of_output_as_lines\n"
        "with failures_of_output_as_lines():\n"
        "    print('a\\udcff…')"
    )
    for encoding, expected in (("utf-8", "a\\udcff…\n"), ("ascii", "a\\udcff\\u2026\n")):
        environment = os.environ | {"PYTHONIOENCODING": f"{encoding}:strict"}
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, env=environment)
        assert (done.returncode, done.stdout.decode(encoding), done.stderr) == (0, expected, b"")
