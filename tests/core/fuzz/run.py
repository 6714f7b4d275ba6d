"""Fuzz the core: `make fuzz`, or `python tests/core/fuzz/run.py [--seconds N] [--keep]`.

libFuzzer starts from the committed corpus and the finds of earlier runs. An input that breaks the core is written to
`build/fuzz`, and the printed command shows what the input does. With `--keep`, the corpus is replaced by a minimal set
of inputs that covers as much as all known inputs.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from core_build import HARNESS, HARNESS_INCLUDES, ROOT, Build, replay_program

WORK = ROOT / "build/fuzz"
CORPUS = HARNESS / "corpus"
MAX_INPUT_BYTES = 200
# Older versions lack `std::source_location`, and the plain name, tried last, may be one of them.
CLANGS = [*(f"clang++-{version}" for version in range(21, 15, -1)), "clang++"]


def fuzzer() -> Path:
    clang = next((found for name in CLANGS if (found := shutil.which(name))), None)
    if clang is None:
        sys.exit("fuzzing needs clang with libFuzzer; on Debian: apt-get install clang-16 libclang-rt-16-dev")
    flags = (
        "-O1",
        "-g",
        "-D_GLIBCXX_ASSERTIONS",
        "-fsanitize=undefined",
        "-fno-sanitize-recover=undefined",
        HARNESS_INCLUDES,
    )
    build = Build((*flags, "-fsanitize=fuzzer-no-link"), clang)
    harness = build.objects(HARNESS / name for name in ("history.cpp", "simulated_engine.cpp", "fuzz_target.cpp"))
    return build.link([*build.core_objects(), *harness], WORK / "fuzz_core", "-fsanitize=fuzzer,undefined")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=900)
    parser.add_argument("--keep", action="store_true", help="replace the committed corpus by a minimal one")
    arguments = parser.parse_args()
    found = WORK / "corpus"
    found.mkdir(parents=True, exist_ok=True)
    program = fuzzer()
    options = [f"-max_len={MAX_INPUT_BYTES}", "-timeout=30", f"-artifact_prefix={WORK}/"]
    done = subprocess.run([program, *options, f"-max_total_time={arguments.seconds}", found, CORPUS])
    if done.returncode:
        print(f"What an input does: {replay_program(WORK / 'replay')} --trace {WORK}/crash-...")
    elif arguments.keep:
        keep(program, found)
    return done.returncode


def keep(program: Path, found: Path) -> None:
    """Keep a set of inputs that covers every branch that any input covers. Named inputs always stay."""
    smallest = WORK / "smallest"
    shutil.rmtree(smallest, ignore_errors=True)
    smallest.mkdir()
    subprocess.run([program, "-merge=1", "-use_counters=0", smallest, CORPUS, found], check=True)
    for old in CORPUS.glob("cover-*"):
        old.unlink()
    named = {path.read_bytes() for path in CORPUS.iterdir()}
    for new in smallest.iterdir():
        if new.read_bytes() not in named:
            shutil.copy(new, CORPUS / f"cover-{new.name[:16]}")


if __name__ == "__main__":
    sys.exit(main())
