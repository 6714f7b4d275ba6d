"""Plots of a simulated node: what each model lent and borrowed, and how long its requests waited."""

from __future__ import annotations

from pathlib import Path

from swiftkv.errors import ConfigError
from swiftkv.simulate.node import NodeOutcome

_MIB = 1 << 20


def check_can_draw(path: Path) -> None:
    """Raise `ConfigError` without matplotlib, or for a file that it could not write."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError("--plot: needs matplotlib: pip install 'swiftkv[bench]'") from None
    mpl.use("Agg")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ConfigError(f"--plot: cannot write a '{path.suffix}' file; supported are {', '.join(sorted(known))}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no directory '{path.parent}'")


def draw(outcomes: dict[str, NodeOutcome], path: Path) -> None:
    """Draw a row of two panels for each model, in the format that the suffix of `path` names.

    Raises `ConfigError` for a file that cannot be written. Call `check_can_draw` first.
    """
    from matplotlib import pyplot as plt

    figure, rows = plt.subplots(
        len(outcomes), 2, figsize=(10, 2.6 * len(outcomes)), layout="constrained", sharex=True, squeeze=False
    )
    for (waits, lending), (name, outcome) in zip(rows, outcomes.items(), strict=True):
        requests = outcome.requests.served()
        waits.plot(requests.arrival_s, requests.ttft_s, ".", markersize=3)
        waits.set(title=name, ylabel="to the first token, s")
        if outcome.leases is not None:
            for label, history in (("lent", outcome.leases.lent_bytes), ("borrowed", outcome.leases.borrowed_bytes)):
                if any(num_bytes for _, num_bytes in history):
                    times_s, num_bytes = zip(*history, strict=True)
                    lending.step(times_s, [size / _MIB for size in num_bytes], where="post", label=label)
                    lending.legend()
        lending.set(ylabel="MiB")
    for axes in rows[-1]:
        axes.set_xlabel("seconds")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot: {error}") from None
    finally:
        plt.close(figure)
