"""One picture of a calibration: what share of questions would be served, and how often wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.core.cache.calibration import Calibration
from headrace.core.cache.certify import Certificate, upper_error
from headrace.lab.bench.plot import NoPlots


def plot_calibration(
    calibration: Calibration, certificates: Sequence[Certificate], confidence: float, path: Path, title: str
) -> None:
    """Write a PNG with the share of wrong hits over the share of hits, its upper bound, and what is certified.

    Raises:
        NoPlots: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise NoPlots('no plot without matplotlib: pip install "headrace[bench]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    tallies = [tally for tally in calibration.held if tally.served]
    hits = [100 * tally.served / calibration.held_rows for tally in tallies]
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    axis.plot(hits, [100 * tally.wrong / tally.served for tally in tallies], marker=".", label="seen")
    bounds = [100 * upper_error(tally.wrong, tally.served, confidence) for tally in tallies]
    axis.plot(hits, bounds, linestyle="--", label=f"upper bound, {confidence:.0%}")
    for certificate in certificates:
        share = 100 * certificate.tally.served / calibration.held_rows
        axis.plot(
            [share],
            [100 * certificate.bound],
            marker="o",
            linestyle="",
            label=f"certified {certificate.bound:.2%}",
        )
    axis.set_xlabel("questions served, %")
    axis.set_ylabel("wrong among the served, %")
    axis.set_ylim(0, 10)
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
