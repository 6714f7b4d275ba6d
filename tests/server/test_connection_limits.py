"""Limits on connections and on what is logged of them, and the rounds in which requests begin."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
from protocol_server import GET, LINE, PATIENT, SOON, serving

from swiftkv.server.limits import SPARE_CONNECTIONS
from swiftkv.server.log_limit import MAX_KINDS, LogLimit


def test_connections_beyond_the_limit_are_refused_and_health_is_not() -> None:
    async def run() -> None:
        async with serving(max_connections=3) as server:
            idle = [await server.connect() for _ in range(3)]
            await server.wait_until(lambda: server.limits.num_connections == 3)
            refused = await server.exchange([GET])
            assert refused.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in refused
            for path in (b"/health", b"/ready", b"/metrics", b"/models/chat/ready"):
                answer = await server.exchange([b"GET %s HTTP/1.1\r\nhost: here\r\n\r\n" % path])
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert b"connection: close" in answer
            await server.wait_until(lambda: server.limits.num_connections == 3)
            idle += [await server.connect() for _ in range(SPARE_CONNECTIONS)]
            await server.wait_until(lambda: server.limits.num_connections == 3 + SPARE_CONNECTIONS)
            assert (await server.exchange([])).startswith(b"HTTP/1.1 503 ")
            for _, writer in idle:
                writer.close()
            await server.wait_until(lambda: server.limits.num_connections == 0)
            assert (await server.exchange([LINE + b"connection: close\r\n\r\n"])).startswith(b"HTTP/1.1 200 ")

    asyncio.run(run())


def test_connections_for_monitoring_must_be_quick() -> None:
    async def run() -> None:
        async with serving(replace(PATIENT, spare_head_s=SOON), max_connections=1) as server:
            _, regular = await server.connect()
            assert await server.exchange([]) == b""
            regular.close()

    asyncio.run(run())


def test_many_requests_at_once_begin_in_turns_and_health_before_them() -> None:
    async def run() -> list[str]:
        async with serving() as server:
            writers = [(await server.connect())[1] for _ in range(101)]
            for writer in writers[:100]:
                writer.write(b"GET /v1/models HTTP/1.1\r\nhost: here\r\n\r\n")
            writers[100].write(b"GET /health HTTP/1.1\r\nhost: here\r\n\r\n")
            await server.wait_until(lambda: len(server.ended) == 101)
            for writer in writers:
                writer.close()
            return server.ended

    assert asyncio.run(run()).index("/health") < 20


def test_bad_requests_do_not_flood_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving() as server:
            for _ in range(50):
                assert (await server.exchange([b"\x00\x01\r\n\r\n"])).startswith(b"HTTP/1.1 400 ")

    asyncio.run(run())  # the records come to the handlers of the node's log, which give them their times
    first, *others = (record.getMessage() for record in caplog.records)
    assert first == "Invalid HTTP request received."
    assert len(others) < 10  # one for each interval of a slow machine


def test_messages_that_were_left_out_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tests.log_limit")
    now_s = 1000.0
    limit = LogLimit(interval_s=10.0, clock=lambda: now_s)
    logger.addFilter(limit)
    for number in range(5):
        logger.warning("request %d is bad", number)
    logger.warning("something else")
    now_s += 10.0
    logger.warning("request %d is bad", 5)
    logger.removeFilter(limit)
    assert [record.getMessage() for record in caplog.records] == [
        "request 0 is bad", "something else", "request 5 is bad (4 more like it were left out)",
    ]  # fmt: skip


def test_messages_that_differ_in_a_later_line_are_one_kind_and_kinds_are_bounded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("tests.log_limit")
    limit = LogLimit(interval_s=10.0, clock=lambda: 1000.0)
    logger.addFilter(limit)
    for number in range(5):
        logger.warning(f"a task failed\ntask: number {number}")
    assert [record.getMessage() for record in caplog.records] == ["a task failed\ntask: number 0"]
    for number in range(10 * MAX_KINDS):
        logger.warning(f"message {number}")
    logger.removeFilter(limit)
    assert limit.num_kinds == MAX_KINDS
