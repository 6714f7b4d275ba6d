"""The model that a request asks for: picking it, applying its sender's policy, waking it, working in its threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request

from swiftkv.server.models import ModelHandle, ModelTable
from swiftkv.server.request_log import RequestRecord
from swiftkv.server.streaming import unless_gone
from swiftkv.server.tenants import sender_of

T = TypeVar("T")


def asked_model(request: Request, models: ModelTable, in_body: str | None) -> ModelHandle:
    """Return the model of the path parameter `name`, if there is one, or of the body's field `model`."""
    return models.pick(request.path_params.get("name"), in_body)


def as_sent(request: Request, model: ModelHandle) -> ModelHandle:
    """Return the model with its policy for the request's sender; note both in the request's record."""
    record: RequestRecord = request.state.record
    sender = sender_of(request)
    record.model, record.tenant = model.name, sender.name
    return model.serving(sender)


async def awake(request: Request, models: ModelTable, model: ModelHandle) -> ModelHandle:
    """Wake a model if requests may wake it, and return its handle.

    A model that is put to sleep meanwhile is woken again. The handle may be a new one: a model that was reloaded may
    have another tokenizer, and the old handle's threads have ended.
    """
    while model.must_wake:
        await unless_gone(request.receive, model.sleeper.wake_for_request())
        model = as_sent(request, models.get(model.name))
    return model


async def in_threads(request: Request, model: ModelHandle, work: Callable[[], T]) -> T:
    """Do `work` in the model's threads, unless the client hangs up before the work begins."""
    return await unless_gone(request.receive, model.in_threads(work, request.state.num_body_bytes))
