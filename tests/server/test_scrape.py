"""Scrapes of the metrics: fresh, shared by those who wait, and paced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise

from prometheus_client.exposition import generate_latest

from swiftkv.server.metrics import GatewayMetrics
from swiftkv.server.scrape import SLICE_S, ScrapePace, Scrapes


class Figures:
    """Figures that count how often they were made; `asked` is set when somebody brings them up to date."""

    def __init__(self, render_s: float = 0.0) -> None:
        self.rendered: list[tuple[float, float]] = []  # from, to
        self.asked = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self._render_s = render_s

    async def observe(self) -> None:
        self.asked.set()
        await self.may_go_on.wait()

    def render(self) -> Iterator[bytes]:
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + self._render_s:
            pass
        self.rendered.append((begun_s, time.monotonic()))
        yield b"%d" % len(self.rendered)


def test_those_who_wait_share_an_answer_that_is_newer_than_their_question() -> None:
    async def run() -> tuple[list[bytes], list[bytes]]:
        figures = Figures()
        scrapes = Scrapes(figures.observe, figures.render, ScrapePace())
        early = [asyncio.create_task(scrapes.text()) for _ in range(10)]
        await figures.asked.wait()
        late = [asyncio.create_task(scrapes.text()) for _ in range(10)]  # the first are being answered
        await asyncio.sleep(0)
        figures.may_go_on.set()
        return await asyncio.gather(*early), await asyncio.gather(*late)

    assert asyncio.run(run()) == ([b"1"] * 10, [b"2"] * 10)


def test_rendering_takes_a_tenth_of_the_time_at_most() -> None:
    async def run() -> list[tuple[float, float]]:
        figures = Figures(render_s=0.01)
        figures.may_go_on.set()
        scrapes = Scrapes(figures.observe, figures.render, ScrapePace())
        for _ in range(4):
            await scrapes.text()
        return figures.rendered

    rendered = asyncio.run(run())
    for (begun_s, ended_s), (next_s, _) in pairwise(rendered):
        assert next_s - begun_s >= 9.9 * (ended_s - begun_s)


def test_a_scrape_that_is_given_up_takes_no_other_along() -> None:
    async def run() -> bytes:
        figures = Figures()
        scrapes = Scrapes(figures.observe, figures.render, ScrapePace())
        impatient, patient = (asyncio.create_task(scrapes.text()) for _ in range(2))
        await figures.asked.wait()
        impatient.cancel()
        figures.may_go_on.set()
        return await patient

    assert asyncio.run(run()) == b"1"


def test_a_failure_is_everybodys_who_waited_and_not_the_next_ones() -> None:
    async def run() -> bytes:
        calls = 0

        async def observe() -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise ConnectionError("no coordinator")

        scrapes = Scrapes(observe, lambda: [b"te", b"xt"], ScrapePace())
        for failed in await asyncio.gather(scrapes.text(), scrapes.text(), return_exceptions=True):
            assert isinstance(failed, ConnectionError)
        return await scrapes.text()

    assert asyncio.run(run()) == b"text"


def test_others_run_between_pieces_that_take_long() -> None:
    async def run() -> tuple[bytes, list[int]]:
        rounds_before: list[int] = []
        num_rounds = 0

        async def observe() -> None:
            pass

        async def count_rounds() -> None:
            nonlocal num_rounds
            while True:
                num_rounds += 1
                await asyncio.sleep(0)

        def render() -> Iterator[bytes]:
            for piece in range(4):
                rounds_before.append(num_rounds)
                begun_s = time.monotonic()
                while time.monotonic() < begun_s + SLICE_S:
                    pass
                yield b"%d" % piece

        others = asyncio.create_task(count_rounds())
        text = await Scrapes(observe, render, ScrapePace()).text()
        others.cancel()
        return text, rounds_before

    text, rounds_before = asyncio.run(run())
    assert text == b"0123"
    assert all(before < after for before, after in pairwise(rounds_before))


def test_each_metric_is_a_piece() -> None:
    metrics = GatewayMetrics()
    for name in ("chat", "code"):
        metrics.for_model(name)
    for only in (None, "chat"):
        pieces = list(metrics.render(only))
        assert all(piece.count(b"# TYPE ") <= 2 for piece in pieces)  # the second is of when it was created
        assert len({piece.partition(b"\n")[0] for piece in pieces}) == len(pieces)
    assert b"".join(metrics.render()) == generate_latest(metrics.registry)
