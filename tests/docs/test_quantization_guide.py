"""The guide to quantization names every format and scheme, and the bounds and amounts that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.quantize import quantize
from headrace.compute import quantizing as quality
from headrace.compute.quantization import formats
from headrace.compute.quantization.scheme import WRITTEN
from headrace.wiring import quantizing

GUIDE = (Path(__file__).parents[2] / "docs" / "guide" / "quantization.md").read_text()
TEXT = " ".join(GUIDE.split())


@pytest.mark.parametrize(
    "name", [*formats._METHODS, *WRITTEN, *(method for _, method in quantizing.REPORTED)]
)
def test_every_format_scheme_and_method_has_its_row(name: str) -> None:
    assert f"\n| `{name}` |" in GUIDE


def test_bounds_and_amounts_are_those_of_the_code() -> None:
    assert f"grew by more than {quality.MOST_PERPLEXITY:.0%}".replace("%", " %") in TEXT
    assert f"more than {quality.MOST_DIVERGENCE:g} nats" in TEXT
    assert f"{quantizing.WINDOWS} windows of {quantizing.WINDOW} are used" in TEXT
    for reported in (TEXT, " ".join((quantize.__doc__ or "").split())):
        assert f"that fifth is less than {quantizing.LEAST_TOKENS:,} tokens" in reported
    assert quantizing.HELD_OUT == 5
    assert "shorter windows, five at least" in TEXT
    assert "on a fifth of the text" in TEXT


def test_the_tables_shown_have_a_line_for_every_way() -> None:
    ways = ["--kv-cache-dtype int8", *(f"--quantization {scheme}" for scheme in WRITTEN)]
    ways += [f"written {scheme} {method}" for scheme, method in quantizing.REPORTED]
    for way in ways:
        assert GUIDE.count(f"\n{way} ") == 2
