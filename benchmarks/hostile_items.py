"""Send one of hostile.py's attacks from a process of its own:

    python benchmarks/hostile_items.py ITEM HOST PORT MODEL --seconds 60

Sends ITEM once a second, each time from a new thread, so that the attacker never waits for an answer. Prints, as JSON,
how often each answer came: HTTP statuses, `closed` (before the answer had ended), `no answer` (nothing came for 20 s),
`refused` (no connection could be made), `waiting` (has not ended yet), `held` (connections still open). `given up` and
`unread` are requests whose answer is not read. All sockets are closed when the program ends.

The file is long because it is a list: each attack stands beside the bytes that it sends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from hostile_target import KEY_VARIABLE, PIECE, Target, still_open

MIB = 1 << 20
_LAST_WORDS_S = 3.0
"""The time for which the attacker waits for answers after its last send."""
_COMPLETIONS = "/v1/completions"
_CHAT = "/v1/chat/completions"
_TOKEN_IDS = (300, 4000)


Send = Callable[[Target], None]


@dataclass(frozen=True)
class Item:
    """One attack."""

    name: str
    about: str
    send: Send
    same_as: int = 1
    """The number of ordinary requests a second that make the engine compute as many sequences."""


def fill(start: bytes, piece: bytes, end: bytes, num_bytes: int) -> bytes:
    """Return `start`, then `piece` repeated, then `end`: about `num_bytes` in all."""
    return start + piece * ((num_bytes - len(start) - len(end)) // len(piece)) + end


def numbered(start: str, entry: str, end: str, number: int) -> bytes:
    """Return `number` entries, each with its own number in the place of `%d`, separated by commas."""
    return (start + ",".join(entry % i for i in range(number)) + end).encode()


def token_ids(number: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(*_TOKEN_IDS) for _ in range(number)]


def body(model: str, **fields: object) -> bytes:
    return json.dumps({"model": model, **fields}).encode()


def body_start(model: str, **fields: object) -> str:
    """Return the beginning of a body; its last field follows."""
    return body(model, **fields).decode()[:-1] + ", "


# Bodies that are wrong


@cache
def wrong_parts_body(model: str, num_bytes: int) -> bytes:
    start = f'{{"model": "{model}", "messages": [{{"role": "user", "content": ['
    return fill(start.encode(), b"1,", b"1]}]}", num_bytes)


def wrong_parts(num_bytes: int) -> Send:
    return lambda target: target.ask(_CHAT, wrong_parts_body(target.model, num_bytes))


@cache
def many_entries_body(model: str, field: str, entry: str, number: int) -> bytes:
    start = body_start(model, prompt="a", max_tokens=1)
    return numbered(f'{start}"{field}": {{' if field else start, entry, "}}" if field else "}", number)


def many_entries(field: str, entry: str, number: int) -> Send:
    """Return a send of a completion with `number` entries in one of its fields, or with `number` fields."""
    return lambda target: target.ask(_COMPLETIONS, many_entries_body(target.model, field, entry, number))


@cache
def nested_body(num_bytes: int) -> bytes:
    return fill(b'{"prompt": ', b"[", b"", num_bytes)


@cache
def wrong_text_body(num_bytes: int) -> bytes:
    return fill(b'{"prompt": "', b"\xff\xc0\xed\xa0\x80", b'"}', num_bytes)


@cache
def huge_number_body(num_bytes: int) -> bytes:
    return fill(b'{"prompt": "a", "max_tokens": ', b"9", b"}", num_bytes)


def ask_with(make: Callable[[int], bytes], num_bytes: int) -> Send:
    return lambda target: target.ask(_COMPLETIONS, make(num_bytes))


def bad_request_flood(target: Target) -> None:
    """Send two hundred requests that are refused, on one connection."""
    if connection := target.connect():
        with connection:
            for _ in range(200):
                if not target.send(connection, target.post(_COMPLETIONS, b'{"prompt": 1.5}')):
                    break
                target.read(connection)


def broken_request_flood(target: Target) -> None:
    """Open two hundred connections and speak no HTTP."""
    for _ in range(200):
        target.ask_raw(b"\x16\x03\x01\x02\x00 not HTTP \r\n\r\n")


def wrong_hosts(target: Target) -> None:
    paths = ("/v1/models", "/metrics", "/admin/lending", "/health", "/docs")
    for path in paths * 10:
        target.ask_raw(f"GET {path} HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n".encode())


# Requests whose body ends, or should


def chunked(target: Target, key: str | None = None) -> bytes:
    content = body(target.model, prompt="a", max_tokens=1)
    head = target.head(_COMPLETIONS, "Transfer-Encoding: chunked", key=key)
    return head + b"\r\n%x\r\n%s\r\n" % (len(content), content)


@cache
def many_trailers(num_bytes: int) -> bytes:
    return b"0\r\n" + b"a:\r\n" * (num_bytes // 4)


def trailers(target: Target) -> None:
    target.ask_raw(chunked(target), many_trailers(8 * MIB), b"\r\n")


def unfinished_trailer(target: Target) -> None:
    """Send a trailer field that never ends, in pieces."""
    target.ask_raw(chunked(target), b"0\r\na: ", *[b"x" * PIECE] * (8 * MIB // PIECE))


def trailers_after_401(target: Target) -> None:
    target.ask_raw(chunked(target, key="wrong"), many_trailers(8 * MIB), b"\r\n")


def trailers_after_413(target: Target) -> None:
    """Send more than `max_body`, and then trailers."""
    head = target.head(_COMPLETIONS, "Transfer-Encoding: chunked") + b"\r\n"
    chunks = [b"%x\r\n%s\r\n" % (MIB, b" " * MIB)] * 17
    target.ask_raw(head, *chunks, many_trailers(8 * MIB), b"\r\n")


def chunk_extensions(target: Target) -> None:
    extension = b";e=" + b"x" * (PIECE - 3)
    head = target.head(_COMPLETIONS, "Transfer-Encoding: chunked") + b"\r\n1"
    target.ask_raw(head, *[extension] * (8 * MIB // PIECE), b"\r\na\r\n0\r\n\r\n")


# Requests that are valid and expensive


def prompt_logprobs(target: Target) -> None:
    prompts = [token_ids(1000, seed) for seed in range(8)]
    target.ask(_COMPLETIONS, body(target.model, prompt=prompts, n=128, max_tokens=1, prompt_logprobs=20))


def streamed_echo(target: Target) -> None:
    prompts = [token_ids(1000, seed) for seed in range(8)]
    asked = {"n": 16, "max_tokens": 1, "echo": True, "logprobs": 20, "stream": True}
    target.ask(_COMPLETIONS, body(target.model, prompt=prompts, **asked))


@cache
def long_text_body(model: str, num_bytes: int) -> bytes:
    return fill(body_start(model, return_token_strs=True).encode() + b'"prompt": "', b"word ", b'"}', num_bytes)


def tokenize(target: Target) -> None:
    target.ask("/tokenize", long_text_body(target.model, 16 * MIB - 1024))


@cache
def many_ids_body(model: str, num_bytes: int) -> bytes:
    return fill(body_start(model).encode() + b'"tokens": [', b"900,", b"900]}", num_bytes)


def detokenize(target: Target) -> None:
    target.ask("/detokenize", many_ids_body(target.model, 16 * MIB - 1024))


@cache
def many_messages_body(model: str, number: int) -> bytes:
    return body(model, messages=[{"role": "user", "content": "a"}] * number, max_tokens=1)


def many_messages(target: Target) -> None:
    target.ask(_CHAT, many_messages_body(target.model, 20_000))


@cache
def long_stops() -> list[str]:
    rng = random.Random(0)
    return ["".join(rng.choices("etaoin shrdlu", k=1023)) for _ in range(16)]


def stop_strings(target: Target) -> None:
    asked = {"n": 64, "max_tokens": 256, "stop": long_stops(), "stream": True, "ignore_eos": True}
    target.ask(_COMPLETIONS, body(target.model, prompt=token_ids(32, 0), **asked))


def all_places(target: Target) -> None:
    prompts = [token_ids(16, seed) for seed in range(8)]
    target.ask(_COMPLETIONS, body(target.model, prompt=prompts, n=128, max_tokens=64, ignore_eos=True))


def first_in_line(target: Target) -> None:
    asked = {"n": 32, "max_tokens": 64, "priority": -(2**31) + 1, "ignore_eos": True}
    target.ask(_COMPLETIONS, body(target.model, prompt=token_ids(512, 0), **asked))


def ordinary(number: int) -> Send:
    """Return a send of `number` ordinary requests."""

    def send(target: Target) -> None:
        prompts = [token_ids(32, random.randrange(1 << 30)) for _ in range(number)]
        bodies = [body(target.model, prompt=prompt, max_tokens=32, ignore_eos=True) for prompt in prompts]
        target.ask_together([target.post(_COMPLETIONS, content) for content in bodies])

    return send


# Connections


def hold(target: Target, number: int, first: bytes = b"") -> list[socket.socket]:
    """Return `number` new connections that have sent `first` and stay open until the end."""
    connections = [connection for _ in range(number) if (connection := target.connect())]
    for connection in connections:
        target.send(connection, first)
    target.held.extend(connections)
    return connections


def drip(target: Target, connections: Sequence[socket.socket], pieces: Iterator[bytes]) -> None:
    """Send one of `pieces` each second, until the node hangs up on all of them."""
    left = list(connections)
    while left:
        time.sleep(1)
        piece = next(pieces)
        left = [connection for connection in left if target.send(connection, piece)]


def forever(piece: bytes) -> Iterator[bytes]:
    while True:
        yield piece


def slow_heads(target: Target) -> None:
    drip(target, hold(target, 50, f"GET /health HTTP/1.1\r\nHost: {target.host}\r\nX: ".encode()), forever(b"x"))


def slow_bodies(target: Target) -> None:
    head = target.head(_COMPLETIONS, f"Content-Length: {MIB}") + b"\r\n"
    drip(target, hold(target, 50, head), forever(b" "))


def idle_sockets(target: Target) -> None:
    hold(target, 100)


def byte_after_answer(target: Target) -> None:
    """Read an answer, and then send only the first byte of the next request."""
    for connection in hold(target, 100, b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        try:
            connection.recv(PIECE)
        except OSError:
            target.count("closed")
            continue
        target.send(connection, b"G")


@cache
def almost_all(num_bytes: int) -> bytes:
    return b" " * num_bytes


def partial_uploads(target: Target) -> None:
    """Send bodies of 16 MiB that lack their last byte."""
    head = target.head(_COMPLETIONS, f"Content-Length: {16 * MIB}") + b"\r\n"
    for connection in hold(target, 8, head):
        target.send(connection, almost_all(16 * MIB - 1))


def no_reader(target: Target) -> None:
    """Open streams and never read them, over connections with small buffers."""
    asked = {"n": 8, "max_tokens": 2000, "stream": True, "ignore_eos": True}
    request = target.post(_COMPLETIONS, body(target.model, prompt=token_ids(16, 0), **asked))
    for _ in range(8):
        if connection := target.connect(receive_buffer=4096):
            target.held.append(connection)
            target.send(connection, request)
            target.count("unread")


def pipelined(target: Target) -> None:
    """Ask for a long generation, send a second request after it, and read neither answer."""
    asked = {"n": 32, "max_tokens": 4000, "ignore_eos": True}
    if connection := target.connect():
        with connection:
            request = target.post(_COMPLETIONS, body(target.model, prompt=token_ids(16, 0), **asked))
            target.send(connection, request, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            time.sleep(0.1)  # until the node has taken it
            target.count("given up")


def add_and_abort(target: Target) -> None:
    """Ask for streams of long prompts, and hang up on each at once."""
    asked = {"max_tokens": 4000, "stream": True, "ignore_eos": True}
    for _ in range(64):
        prompt = token_ids(3000, random.randrange(1 << 30))
        if connection := target.connect():
            with connection:
                target.send(connection, target.post(_COMPLETIONS, body(target.model, prompt=prompt, **asked)))
                target.count("given up")


ITEMS = (
    Item("parts-1", "`content` of 1 MiB of wrong parts", wrong_parts(MIB)),
    Item("parts-16", "`content` of 16 MiB of wrong parts", wrong_parts(16 * MIB - 1024)),
    Item("logit-bias", "`logit_bias` of 200,000 wrong entries", many_entries("logit_bias", '"x%d": "x"', 200_000)),
    Item("metadata", "`metadata` of 200,000 wrong entries", many_entries("metadata", '"%d": 1', 200_000)),
    Item("fields", "300,000 unknown fields", many_entries("", '"f%d": 1', 300_000)),
    Item("trailers", "8 MiB of trailers", trailers),
    Item("trailer", "a trailer of 8 MiB that does not end", unfinished_trailer),
    Item("trailers-401", "8 MiB of trailers after a 401", trailers_after_401),
    Item("trailers-413", "8 MiB of trailers after a 413", trailers_after_413),
    Item("extensions", "8 MiB of chunk extensions", chunk_extensions),
    Item("prompt-logprobs", "8 prompts x n = 128 x 1,000 prompt logprobs of 20", prompt_logprobs, same_as=128),
    Item("echo", "8 prompts x n = 16, streamed `echo` with logprobs", streamed_echo, same_as=128),
    Item("tokenize", "16 MiB to `/tokenize`", tokenize),
    Item("detokenize", "4 million ids to `/detokenize`", detokenize),
    Item("messages", "20,000 messages", many_messages),
    Item("slow-heads", "50 heads, a byte a second", slow_heads),
    Item("slow-bodies", "50 bodies, a byte a second", slow_bodies),
    Item("idle", "100 connections that say nothing", idle_sockets),
    Item("byte", "100 connections with one byte after an answer", byte_after_answer),
    Item("uploads", "8 bodies of 16 MiB that lack a byte", partial_uploads),
    Item("no-reader", "8 streams of n = 8 that nobody reads", no_reader, same_as=64),
    Item("pipelined", "n = 32, a pipelined request, hang up", pipelined, same_as=32),
    Item("aborts", "64 prompts of 3,000 tokens, each given up at once", add_and_abort, same_as=64),
    Item("stops", "64 sequences with 16 stop strings of 1 KB", stop_strings, same_as=64),
    Item("places", "8 prompts x n = 128: all places of the model", all_places, same_as=128),
    Item("priority", "32 sequences of the highest priority", first_in_line, same_as=32),
    Item("hosts", "50 requests with a wrong `Host`", wrong_hosts),
    Item("bad-requests", "200 requests that are refused", bad_request_flood),
    Item("not-http", "200 connections that do not speak HTTP", broken_request_flood),
    Item("nested", "1 MiB of opening brackets", ask_with(nested_body, MIB)),
    Item("not-utf8", "16 MiB that are not UTF-8", ask_with(wrong_text_body, 16 * MIB - 1024)),
    Item("digits", "a number of 16 million digits", ask_with(huge_number_body, 16 * MIB - 1024)),
)


def control(number: int) -> Item:
    """Return an item that sends `number` ordinary requests to the attacked model."""
    about = f"{number} ordinary request{'s' if number > 1 else ''} (control)"
    return Item(f"ordinary-{number}", about, ordinary(number), same_as=number)


COMPUTED = ("200", "given up", "unread", "waiting")
"""Answers of requests for which an engine may have computed something."""
CONTROLS = {made.name: made for made in map(control, sorted({item.same_as for item in ITEMS}))}
BY_NAME = CONTROLS | {item.name: item for item in ITEMS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("item", choices=list(BY_NAME))
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    target = Target(args.host, args.port, args.model, os.environ[KEY_VARIABLE])
    item = BY_NAME[args.item]
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    begin_s, number = time.monotonic(), 0
    while number < args.seconds:
        time.sleep(max(0.0, begin_s + number - time.monotonic()))
        threading.Thread(target=item.send, args=(target,), daemon=True).start()
        number += 1
    time.sleep(max(0.0, begin_s + args.seconds - time.monotonic()))
    time.sleep(_LAST_WORDS_S)
    target.count("held", sum(map(still_open, target.held.copy())))
    print(json.dumps(target.answers()))
    sys.stdout.flush()
    os._exit(0)  # ends the threads that still wait for answers, too


if __name__ == "__main__":
    main()
