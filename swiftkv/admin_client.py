"""Asks a running node for the command line, by the node's URL and with the admin key."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import quote

import typer

from swiftkv.admin_key import find_admin_key
from swiftkv.errors import ConfigError, SwiftkvError

URL_VARIABLE = "SWIFTKV_URL"
"""The environment variable with the node's URL, for all commands that ask a node."""


def with_scheme(url: str) -> str:
    """Return `url` as HTTP takes it: `127.0.0.1:8000` means `http://127.0.0.1:8000`."""
    return url if "://" in url else f"http://{url}"


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")]
Url = Annotated[str, typer.Option(help="The node's URL.", envvar=URL_VARIABLE, callback=with_scheme)]
AdminKeyEnv = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The environment variable that holds the admin key. If it is unset, the key that the node made is used.",
    ),
]
DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_ADMIN_KEY_ENV = "SWIFTKV_ADMIN_KEY"
EXIT_USAGE = 2
"""The exit code for a user's mistake: a line on stderr says what to change, and nothing was started."""
_TIMEOUT_S = 90.0
SETTINGS_OF_CLIENTS = "the environment variables http_proxy, https_proxy, all_proxy and SSL_CERT_FILE"


class AdminError(SwiftkvError):
    """A node that does not answer, or refuses a request."""


def default_url() -> str:
    """Return the URL of the node that commands ask unless they name another: the environment's, or this machine's."""
    return with_scheme(os.environ.get(URL_VARIABLE) or DEFAULT_URL)


class _Content(dict[str, Any]):
    """The content of an answer. Another server, or a node of another version, may not have a key in it."""

    def __missing__(self, key: str) -> Any:
        raise AdminError(f"the answer has no {key!r}: it is not one of a node of this version; look at --url")


def no_answer_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return the types of what httpx raises if a node does not answer or cannot be asked, and `more` types.

    It cannot be asked at a wrong URL, by a proxy that needs another package, or without the files of certificates.
    """
    import httpx

    return httpx.HTTPError, httpx.InvalidURL, ImportError, OSError, *more


def why_no_answer(url: str, error: Exception, remedy: str = "name the right one with --url") -> str:
    """Return a line about a node that did not answer. One that is starting lets clients connect before it answers."""
    import httpx

    if isinstance(error, httpx.ReadTimeout):
        return f"the node at {url} is starting or busy: it did not answer in time; try again"
    if isinstance(error, ImportError | OSError):
        return f"the node at {url} cannot be asked: {error}; look at {SETTINGS_OF_CLIENTS}"
    return f"no node answers at {url}: {error}; {remedy}"


@contextmanager
def mistakes_of_a_file() -> Iterator[None]:
    """Turn a `ConfigError` about a file that is sent to the node into a line on stderr and exit code 2."""
    try:
        yield
    except ConfigError as error:
        print(f"swiftkv: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USAGE) from None


def admin_key(url: str, admin_key_env: str) -> str | None:
    """Return the admin key of the node at `url`: the environment's, or the one that the node made for this user."""
    return os.environ.get(admin_key_env) or find_admin_key(url)


def admin_path(*parts: str) -> str:
    """Join names to a path below `/admin`, whatever characters they have."""
    return "/".join(quote(part, safe="") for part in parts)


def ask_admin(
    method: str, url: str, path: str, admin_key_env: str, body: object = None, timeout_s: float | None = _TIMEOUT_S
) -> dict[str, Any]:
    """Return the answer of `/admin/PATH`. A failure is a line on stderr and exit code 1."""
    with failures_as_lines():
        return request_admin(method, url, path, admin_key_env, body, timeout_s)


@contextmanager
def failures_as_lines() -> Iterator[None]:
    """Turn an `AdminError` into a line on stderr and exit code 1."""
    try:
        yield
    except AdminError as error:
        print(f"swiftkv: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


def request_admin(
    method: str, url: str, path: str, admin_key_env: str, body: object = None, timeout_s: float | None = _TIMEOUT_S
) -> dict[str, Any]:
    """Return the answer of `/admin/PATH`. Raises `AdminError` if there is none, or the node refuses."""
    import httpx

    key = admin_key(url, admin_key_env)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.request(method, f"{url.rstrip('/')}/admin/{path}", json=body, headers=headers, timeout=timeout_s)
        content = _Content(answer.json())
        if answer.is_success:
            return content
        message = content["error"]["message"]
    except no_answer_errors(ValueError, KeyError, TypeError) as error:
        raise AdminError(why_no_answer(url, error)) from error
    if answer.status_code == 401:
        message = f"{message}; export {admin_key_env}=<admin key>, or name another variable with --admin-key-env"
    raise AdminError(message)
