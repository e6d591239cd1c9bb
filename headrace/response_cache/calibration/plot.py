"""Plot of a calibration: the share of wrong hits against the share of served requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.plots import load_pyplot
from headrace.response_cache.rules.semantic.bounds import Certificate, upper_error
from headrace.response_cache.rules.semantic.calibration import Calibration


def plot_calibration(
    calibration: Calibration, max_errors: Sequence[float], confidence: float, path: Path, title: str
) -> None:
    """Writes a PNG: the share of wrong hits over the hit rate, its upper bound, and the certified thresholds.

    Raises:
        NoPlots: matplotlib is missing.
    """
    pyplot = load_pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for index, stratum in enumerate(calibration.strata):
        tallies = [tally for tally in stratum.held if tally.served]
        hits = [100 * tally.served / stratum.held_rows for tally in tallies]
        wrong = [100 * tally.wrong / tally.served for tally in tallies]
        bounds = [100 * upper_error(tally.wrong, tally.served, confidence) for tally in tallies]
        name = f"from {stratum.entries} entries on" if stratum.entries else "small caches"
        [line] = axis.plot(hits, wrong, marker=".", label=name)
        axis.plot(hits, bounds, linestyle=":", color=line.get_color())
        for max_error in max_errors:
            found = calibration.certificates(max_error, confidence)[index]
            if isinstance(found, Certificate):
                share = 100 * found.tally.served / stratum.held_rows
                axis.plot([share], [100 * found.bound], marker="o", color=line.get_color())
    axis.set_xlabel("requests served from cache, %")
    axis.set_ylabel("wrong hits, % (dotted: upper bound; dots: certified)")
    axis.set_ylim(0, 10)
    axis.set_title(title)
    axis.grid(alpha=0.3)
    axis.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
