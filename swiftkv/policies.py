"""The names of policies, tasks and levels, as the YAML file and the core write them."""

from __future__ import annotations

from typing import Literal

Task = Literal["generate", "embed", "score"]
ServiceTier = Literal["priority", "default", "flex", "batch"]
SchedulingPolicy = Literal["fcfs", "priority", "spf", "hrrn", "turns", "deadline"]
WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
LogLevel = Literal["debug", "info", "warning", "error"]
IoBackend = Literal["kernel", "direct"]
"""HiCache's words: `kernel` gathers and scatters with one launch per layer, `direct` makes one 2-D copy per run."""
PrefetchPolicy = Literal["timeout", "best_effort", "wait_complete"]
