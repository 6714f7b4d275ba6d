"""The host waits for a device's work, and where it is told to no longer than it is told to."""

from __future__ import annotations

import pytest
import torch

from swiftkv.errors import EngineError
from swiftkv.transport.fence import Fence


class Work:
    """Stands for a CUDA event: it is done when it has been looked at so many times."""

    looks_left = 0

    def __init__(self, blocking: bool) -> None:
        assert blocking

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        Work.looks_left -= 1
        return Work.looks_left <= 0

    def synchronize(self) -> None:
        Work.looks_left = 0


@pytest.fixture(autouse=True)
def _device_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Work)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)


@pytest.mark.parametrize("timeout_s", [None, 60.0])
def test_it_returns_when_the_work_is_done(timeout_s: float | None) -> None:
    Work.looks_left = 5
    Fence(torch.device("cuda"), timeout_s).wait()
    assert Work.looks_left == 0


def test_a_step_that_does_not_end_is_an_error() -> None:
    Work.looks_left = 1 << 60
    with pytest.raises(EngineError, match=r"did not end within 0\.01 s"):
        Fence(torch.device("cuda"), 0.01).wait()


def test_without_a_gpu_all_is_done_when_it_is_launched() -> None:
    Fence(torch.device("cpu"), 0.0).wait()
