"""The order in which layers of two KV groups are loaded, awaited and stored."""

from __future__ import annotations

import pytest

from swiftkv.cache.geometry import KVGroup
from swiftkv.master.copy_schedule import CopySchedule, GroupLayer

GROUPS = (
    KVGroup((0, 2, 3), 1, 4, "float32", 16),
    KVGroup((1, 4), 2, 8, "bfloat16", 32, kind="window", window=64),
)


class Recorder:
    """A `Copier` that only notes its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load(self, layer: GroupLayer) -> None:
        assert GROUPS[layer.group].layers[layer.index] == layer.number
        self.calls.append(f"load {layer.number}")

    def store(self, layer: GroupLayer) -> None:
        self.calls.append(f"store {layer.number}")

    def wait_to_write(self, layer: GroupLayer, previous: GroupLayer | None) -> None:
        self.calls.append(f"wait {layer.number}" + ("" if previous is None else f" after {previous.number}"))

    def end(self) -> None:
        self.calls.append("end")


ONE_BUFFER = """
load 0, load 1, wait 0, store 0, load 2, wait 1, store 1, load 4, wait 2 after 0, store 2, load 3, wait 3 after 2,
store 3, wait 4 after 1, store 4, end
"""
TWO_BUFFERS = """
load 0, load 1, load 2, load 4, wait 0, store 0, load 3, wait 1, store 1, wait 2, store 2, wait 3 after 0, store 3,
wait 4, store 4, end
"""


@pytest.mark.parametrize(("num_buffers", "expected"), [(1, ONE_BUFFER), (2, TWO_BUFFERS)])
def test_a_layer_is_loaded_when_its_buffer_is_free(num_buffers: int, expected: str) -> None:
    recorder = Recorder()
    with CopySchedule(GROUPS).copies(num_buffers, recorder) as stream:
        for layer in range(5):
            stream.before_write(layer)
            stream.after_write(layer)
            stream.after_attention(layer)
    assert recorder.calls == expected.replace("\n", " ").strip().split(", ")


def test_a_pass_that_fails_waits_for_no_store() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="no"), CopySchedule(GROUPS).copies(1, recorder):
        raise ValueError("no")
    assert "end" not in recorder.calls
