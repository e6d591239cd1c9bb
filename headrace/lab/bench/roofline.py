"""Roofline of a machine for each part of a step, compared with the time that the engine takes.

A part of a step reads memory and computes. Its lower bound is the slower of the two (the roofline model of Williams,
Waterman and Patterson, doi:10.1145/1498765.1498785); the rest of its time is overhead. `headrace.cli.bench.roofline`
measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.table import Table

Term = Literal["bandwidth", "arithmetic", "overhead"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Measured rates of a machine.

    ``read`` is the memory bandwidth in bytes per second by number of threads; ``products`` are operations per second of
    matrix products (a multiply-add counts as two) by data type and implementation.
    """

    read: Mapping[int, float]
    products: Mapping[str, Mapping[str, float]]

    @property
    def bandwidth(self) -> float:
        return max(self.read.values())

    def peak(self, numbers: str) -> float:
        """Operations per second of the fastest implementation for a data type."""
        return max(self.products[numbers].values())


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step: its seconds, the bytes it must read, and its ``operations`` by data type.

    Several data types are alternatives: each could compute the whole part.
    """

    name: str
    seconds: float
    bytes: float = 0.0
    operations: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bound:
    """A part of a step and its lower bounds on a machine, in seconds."""

    name: str
    seconds: float
    bandwidth: float
    arithmetic: float

    @property
    def allowed(self) -> float:
        return max(self.bandwidth, self.arithmetic)

    @property
    def overhead(self) -> float:
        return max(0.0, self.seconds - self.allowed)

    @property
    def share(self) -> float:
        """The bound as a share of the measured time."""
        return self.allowed / self.seconds if self.seconds else 0.0

    @property
    def held_by(self) -> Term:
        """The largest of the three terms: what an optimization should address."""
        return _largest(self.bandwidth, self.arithmetic, self.overhead)


@dataclass(frozen=True, slots=True)
class Step:
    """Mean of ``count`` steps of one kind, with ``batch`` rows of ``context`` tokens.

    ``seconds`` is the time of a whole step in the engine; the ``parts`` were timed one by one.
    """

    kind: str
    batch: int
    context: int
    count: int
    seconds: float
    parts: tuple[Bound, ...]

    @property
    def allowed(self) -> float:
        """Sum of the parts' bounds: reads of one part do not overlap with arithmetic of another."""
        return sum(part.allowed for part in self.parts)

    @property
    def share(self) -> float:
        """The bound as a share of the measured time."""
        return self.allowed / self.seconds

    @property
    def held_by(self) -> Term:
        """The largest term of the step, in which each part counts with the term that bounds it."""
        bandwidth = sum(part.allowed for part in self.parts if part.bandwidth >= part.arithmetic)
        return _largest(bandwidth, self.allowed - bandwidth, self.seconds - self.allowed)


def _largest(bandwidth: float, arithmetic: float, overhead: float) -> Term:
    terms: dict[Term, float] = {"bandwidth": bandwidth, "arithmetic": arithmetic, "overhead": overhead}
    return max(terms, key=lambda term: terms[term])


def bound(part: Part, machine: Machine) -> Bound:
    """The bounds of a part on a machine, in the part's fastest data type."""
    arithmetic = min((count / machine.peak(type_) for type_, count in part.operations.items()), default=0.0)
    return Bound(part.name, part.seconds, part.bytes / machine.bandwidth, arithmetic)


def prompt_keys(length: int, window: int | None) -> float:
    """Number of query-key pairs of a prompt with causal attention within the window."""
    reach = min(length, window or length)
    return reach * (length - (reach - 1) / 2)


def machine_table(machine: Machine) -> Table:
    """The measured rates as a table."""
    shown = Table(title="the machine", title_justify="left", header_style="bold")
    shown.add_column("")
    shown.add_column("measured", justify="right")
    for threads, rate in machine.read.items():
        shown.add_row(
            f"memory read by {threads} thread{'s' if threads > 1 else ''}", f"{rate / 1e9:.1f} GB/s"
        )
    for numbers, rates in machine.products.items():
        for implementation, rate in rates.items():
            shown.add_row(f"{numbers} products, {implementation}", f"{rate / 1e12:.2f} T/s")
    return shown


def step_table(step: Step) -> Table:
    """A step's parts in milliseconds."""
    title = (
        f"{step.kind}: batch {step.batch}, context {step.context}, mean of {step.count} steps; milliseconds"
    )
    shown = Table(title=title, title_justify="left", header_style="bold")
    shown.add_column("part")
    for column in ("bandwidth", "arithmetic", "allowed", "takes", "share", "held by"):
        shown.add_column(column, justify="right")
    for part in step.parts:
        cells = [_ms(part.bandwidth), _ms(part.arithmetic), _ms(part.allowed), _ms(part.seconds)]
        shown.add_row(part.name, *cells, f"{part.share:.0%}", part.held_by)
    shown.add_section()
    shown.add_row(
        "whole step", "", "", _ms(step.allowed), _ms(step.seconds), f"{step.share:.0%}", step.held_by
    )
    return shown


def document(machine: Machine, steps: Sequence[Step]) -> dict[str, object]:
    """Machine and steps as plain values, in seconds."""
    return {
        "machine_read_bytes_per_second": dict(machine.read),
        "machine_operations_per_second": {name: dict(rates) for name, rates in machine.products.items()},
        "steps": [
            {
                "kind": step.kind,
                "batch": step.batch,
                "context": step.context,
                "count": step.count,
                "seconds": step.seconds,
                "allowed_seconds": step.allowed,
                "parts": [
                    {
                        "name": part.name,
                        "seconds": part.seconds,
                        "bandwidth_seconds": part.bandwidth,
                        "arithmetic_seconds": part.arithmetic,
                        "held_by": part.held_by,
                    }
                    for part in step.parts
                ],
            }
            for step in steps
        ],
    }


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}" if seconds else "-"
