"""Check that the documents name what exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
RELIABILITY = (ROOT / "docs" / "reliability.md").read_text()
NAMED_TESTS = sorted(set(re.findall(r"`(test_\w+)`", RELIABILITY)))
DEFINED_TESTS = frozenset(
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^\s*(?:async )?def (test_\w+)\(", file.read_text(), re.MULTILINE)
)

SOURCES = {
    "::": [file.read_text() for file in (ROOT / "cpp_ext").rglob("*") if file.suffix in (".h", ".cpp")],
    ".": [file.read_text() for file in (ROOT / "swiftkv").rglob("*") if file.suffix in (".py", ".pyi")],
}
"""The files of C++ and of Python, by what stands between a class and its member."""


@pytest.mark.parametrize("name", NAMED_TESTS)
def test_what_reliability_says_is_shown_by_a_test_that_exists(name: str) -> None:
    assert name in DEFINED_TESTS


def test_every_fault_has_a_test() -> None:
    """Each row of the table of what can go wrong names at least one."""
    table = RELIABILITY.partition("## What can go wrong")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith(("| **", "| ---"))]
    assert len(rows) > 20
    assert [row for row in rows[1:] if "`test_" not in row] == []


def anchors(document: Path) -> set[str]:
    """Return the anchors of a Markdown file: those of its headings, as GitHub makes them, and explicit ones."""
    text = document.read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings} | set(
        re.findall(r'<a id="([^"]+)">', text)
    )


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_between_documents_leads_somewhere(document: Path) -> None:
    broken = []
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text()):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_benchmarks_name_commits_that_exist() -> None:
    texts = [document.read_text() for document in DOCUMENTS if document.is_relative_to(ROOT / "benchmarks")]
    words = {word for text in texts for word in re.findall(r"\b[0-9a-f]{7,12}\b", text)}
    named = sorted(word for word in words if re.search("[0-9]", word) and re.search("[a-f]", word))
    asked = "".join(f"{commit}^{{commit}}\n" for commit in named)
    git = ["git", "-C", str(ROOT), "cat-file", "--batch-check"]
    answers = subprocess.run(git, input=asked, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()
    missing = [commit for commit, answer in zip(named, answers, strict=False) if answer.endswith("missing")]
    if len(missing) == len(answers):
        pytest.skip("the history is not here")
    assert missing == []


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_documents_name_files_that_exist(document: Path) -> None:
    """Paths count from the repository or from the package."""
    named = set(re.findall(r"(?<![\w/])((?:\w+/)*\w+\.(?:py|cpp|yaml))(?!\w)", document.read_text()))
    bases = (ROOT, ROOT / "swiftkv")
    assert [path for path in sorted(named) if not any((base / path).exists() for base in bases)] == []


@pytest.mark.parametrize("document", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_documents_name_members_that_exist(document: Path) -> None:
    """A class and its member occur in one file: that of the class, or one that defines the member."""
    missing = [
        f"{owner}{joint}{member}"
        for owner, joint, member in re.findall(r"`([A-Z]\w+)(::|\.)([a-z_]\w*)`", document.read_text())
        if not any(re.search(rf"\b{owner}\b", text) and re.search(rf"\b{member}\b", text) for text in SOURCES[joint])
    ]
    assert missing == []


def test_the_glossary_has_one_line_a_word_in_alphabetical_order() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| <a id=")]
    words = [re.sub(r"<[^>]*>", "", row.split("|")[1]).strip().lower() for row in rows]
    assert len(words) > 40
    assert words == sorted(set(words))
