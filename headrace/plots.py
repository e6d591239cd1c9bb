"""matplotlib, for commands that write plots; it is only imported when a plot is written."""

from __future__ import annotations

from typing import Any


class NoPlots(RuntimeError):
    """matplotlib is not installed; the message says what to install."""


def load_pyplot() -> Any:
    """matplotlib's pyplot with a backend that writes files only.

    Raises:
        NoPlots: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise NoPlots('no plot without matplotlib: pip install "headrace[bench]"') from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
