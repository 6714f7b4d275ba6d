"""The OpenAPI document, compared with the server: schemathesis makes requests from it and reads the answers.

Runs against a gateway with an echo engine; `SWIFTKV_TEST_URL` points it at a node that is up, or a model's own port,
and `SWIFTKV_TEST_ADMIN_KEY` holds that node's admin key.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from echo_gateway import start_gateway

from swiftkv.models.pooling import EmbeddingRecipe
from swiftkv.server.app import ServerSettings
from swiftkv.server.tokenizer import Tokenizer

COMMAND = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"]
OPTIONS = [
    "--phases=examples,coverage,fuzzing",
    "--max-examples=20",
    # A body can fit the schema and not the model (a token id it does not have, a prompt too long): that is a 400.
    "--exclude-checks=positive_data_acceptance",
    "--continue-on-failure",
    "--suppress-health-check=all",
    "--request-timeout=60",
    # With more, Python 3.11 fails to parse now and then: hypothesis moves the limit of recursion in another thread.
    "--workers=1",
    "--warnings=off",
    "--no-color",
    *(["--generation-deterministic"] if os.environ.get("CI") else []),
]

FUZZING = ["--phases=fuzzing", "--max-examples=100"]


@pytest.fixture(
    params=[
        "a model's port",
        "/admin of the node's port",
        pytest.param("files and batches", marks=pytest.mark.slow),
        pytest.param("/v1/responses", marks=pytest.mark.slow),
        pytest.param("/v1/messages", marks=pytest.mark.slow),
        pytest.param("embeddings and scores", marks=pytest.mark.slow),
    ]
)
def url_and_options(request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[list[str]]:
    is_admin = request.param.startswith("/admin")
    settings = ServerSettings()
    key = os.environ.get("SWIFTKV_TEST_ADMIN_KEY", settings.admin_key)
    options = {
        # A model that is put to sleep answers 503 to everything else.
        "/admin of the node's port": [
            "--include-path-regex=^/admin",
            "--exclude-path-regex=/sleep$",
            f"--header=Authorization: Bearer {key}",
        ],
        "files and batches": ["--include-path-regex=^/v1/(files|batches)"],
        # Arrays as long as they may be, of parts as large, are bodies of 100 MB: a 413 that is expected of no schema.
        "/v1/responses": ["--include-path-regex=^/v1/responses", *FUZZING],
        "/v1/messages": ["--include-path-regex=^/v1/messages", *FUZZING],
        "embeddings and scores": ["--include-path-regex=^/v1/(embeddings|score|rerank)", *FUZZING],
    }.get(request.param, ["--exclude-path-regex=^/v1/(files|batches|responses|messages|embeddings|score|rerank)"])
    if given := os.environ.get("SWIFTKV_TEST_URL"):
        yield [f"{given}/openapi.json", *options]
        return
    (tmp_path / "state").mkdir()
    task = {"embedding": EmbeddingRecipe(4)} if request.param == "embeddings and scores" else {}
    gateway, stop = start_gateway(
        tmp_path, tokenizer, max_model_len=64, settings=settings, state=tmp_path / "state", **task
    )
    yield [f"{gateway.url if is_admin else gateway.model_url}/openapi.json", *options]
    stop()


def test_the_server_does_as_its_document_says(url_and_options: list[str], tmp_path: Path) -> None:
    command = [*COMMAND, *OPTIONS, *url_and_options]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stdout + finished.stderr
