"""The C++ beside the kernels and host memory under AddressSanitizer and UBSan: `make sanitize`.

The extensions are built once more, with the sanitizers, and the tests run against them. Leaks are not looked for:
Python itself and torch keep much until the process ends.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from core_build import CXX, ROOT

BUILD = ROOT / "build/sanitize"
EXTENSIONS = BUILD / "extensions"
TESTS = [
    *(str(path) for path in sorted(Path(__file__).parent.glob("test_*.py")) if path != Path(__file__)),
    *("tests/lease/test_ledgers.py", "tests/lease/test_ledger_states.py", "tests/transport/test_copy_engine.py"),
    *("tests/transport/test_transport.py", "tests/storage/test_file_reads.py"),
]
MESSAGE = re.compile(r"^.*(?:: runtime error: |ERROR: AddressSanitizer: ).*$", re.MULTILINE)


def runtime(library: str) -> str:
    """The path of one of the compiler's libraries."""
    found = subprocess.run([CXX, f"-print-file-name={library}"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def build() -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    configure = ["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug", "-DSWIFTKV_SANITIZE=ON"]
    options = [f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={EXTENSIONS}", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run([*configure, *options], check=True, env=environment)
    targets = ["--target", "_core", "_lease", "_transport", "_files"]
    subprocess.run(["cmake", "--build", BUILD, *targets], check=True, env=environment)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "SWIFTKV_EXTENSIONS": str(EXTENSIONS),
        "LD_PRELOAD": f"{runtime('libasan.so')}:{runtime('libubsan.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "CI": "1",
    }
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def run_tests(*files: str) -> tuple[subprocess.CompletedProcess[str], str | None]:
    """Run tests against the extensions that are built; return the sanitizers' first message with what follows it."""
    # Sanitizers write to descriptor 2, which pytest would capture and lose when they end the process.
    # No test has a limit of its own: sanitizers make all of them several times slower, and the caller's limit holds.
    options = ("-s", "--timeout=0", "-p", "tests.support.extensions", "-p", "no:cacheprovider")
    done = run("-m", "pytest", *options, *files)
    message = MESSAGE.search(done.stderr)
    return done, message and done.stderr[message.start() :][:6000]


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_nothing_is_found() -> None:
    build()
    done, message = run_tests(*TESTS)
    assert message is None, message
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["a.cpp:1:2: runtime error: signed integer overflow", "==7==ERROR: AddressSanitizer: x"]
)
def test_a_message_of_a_sanitizer_is_seen(text: str, tmp_path: Path) -> None:
    writes = tmp_path / "test_writes.py"
    writes.write_text(f"import os\n\ndef test_it():\n    os.write(2, {text.encode()!r} + b'\\n')\n")
    done, message = run_tests(str(writes))
    assert done.returncode == 0, done.stdout
    assert message is not None
    assert message.splitlines()[0] == text


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_extensions_that_are_tested_have_the_sanitizers() -> None:
    build()
    script = "import tests.support.extensions; from swiftkv import _core, _files, _lease, _transport; "
    done = run("-c", script + "print(_core.__file__, _files.__file__, _lease.__file__, _transport.__file__)")
    assert done.returncode == 0, done.stderr
    for file in done.stdout.split():
        assert b"__asan_init" in Path(file).read_bytes()
