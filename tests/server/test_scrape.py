"""Scrapes of the metrics: fresh, shared by those who wait, and paced."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise

from swiftkv.server.scrape import ScrapePace, Scrapes


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

    def render(self) -> bytes:
        begun_s = time.monotonic()
        while time.monotonic() < begun_s + self._render_s:
            pass
        self.rendered.append((begun_s, time.monotonic()))
        return b"%d" % len(self.rendered)


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

        scrapes = Scrapes(observe, lambda: b"text", ScrapePace())
        for failed in await asyncio.gather(scrapes.text(), scrapes.text(), return_exceptions=True):
            assert isinstance(failed, ConnectionError)
        return await scrapes.text()

    assert asyncio.run(run()) == b"text"
