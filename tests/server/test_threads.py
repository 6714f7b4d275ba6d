"""The threads of a model's tokenizer, which end when the model leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from echo_gateway import PATIENCE_S, Gateway

from swiftkv.server.errors import ApiError
from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.threads import BoundedThreads


def threads_of(purpose: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(purpose)]


def wait_until_ended(purpose: str) -> None:
    until = time.monotonic() + PATIENCE_S
    for thread in threads_of(purpose):
        thread.join(until - time.monotonic())
    assert not threads_of(purpose)


def used_model(gateway: Gateway, purpose: str) -> ModelHandle:
    model = replace(gateway.models["chat"], name="brief", threads=BoundedThreads(purpose))
    asyncio.run(model.threads.run(lambda: None))
    assert threads_of(purpose)
    return model


def leaves(table: ModelTable, model: ModelHandle) -> None:
    table.remove(model.name)


def is_replaced(table: ModelTable, model: ModelHandle) -> None:
    table.add(replace(model, threads=BoundedThreads("another")))


@pytest.mark.parametrize("change", [leaves, is_replaced])
def test_the_threads_of_a_model_end_with_it(
    gateway: Gateway, change: Callable[[ModelTable, ModelHandle], None]
) -> None:
    purpose = change.__name__
    model = used_model(gateway, purpose)  # which is held on to, so that nothing collects it
    change(ModelTable({model.name: model}), model)
    wait_until_ended(purpose)
    with pytest.raises(ApiError) as refused:
        asyncio.run(model.threads.run(lambda: None))
    assert refused.value.status == 503


def test_closed_threads_do_what_they_have_begun_and_refuse_what_waits() -> None:
    async def run() -> tuple[list[object], list[bool]]:
        release, did = threading.Event(), []
        threads = BoundedThreads("a-closed-test", workers=1)
        begun = asyncio.ensure_future(threads.run(lambda: release.wait(PATIENCE_S)))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(threads.run(lambda: did.append(True))) for _ in range(3)]
        await asyncio.sleep(0)
        threads.close()
        release.set()
        return await asyncio.gather(begun, *waiting, return_exceptions=True), did

    (begun, *waiting), did = asyncio.run(run())
    assert begun is True
    assert [getattr(error, "status", None) for error in waiting] == [503] * 3
    assert not did
    wait_until_ended("a-closed-test")
