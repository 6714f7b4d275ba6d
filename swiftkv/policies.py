"""The names of policies, as the YAML file and the core write them."""

from __future__ import annotations

from typing import Literal

SchedulingPolicy = Literal["fcfs", "priority", "spf", "hrrn", "deadline"]
WritePolicy = Literal["write_through", "write_through_selective"]
PrefetchPolicy = Literal["timeout", "best_effort", "wait_complete"]
