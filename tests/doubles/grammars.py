"""Doubles of `core.ports.Grammars`."""

from __future__ import annotations

from headrace.core.constraint import Constraint, UnusableConstraint


class Compiled:
    """Everything is compiled at once, and any text that ends in ``whole`` is complete."""

    def __init__(self, whole: str = "") -> None:
        self.whole = whole

    def ready(self, constraint: Constraint) -> bool:
        return True

    def check(self, constraint: Constraint) -> None:
        pass

    def is_complete(self, constraint: Constraint, text: str) -> bool:
        return text.endswith(self.whole)


class Compiling(Compiled):
    """Nothing is compiled before ``done`` is set; ``problem`` is why some constraint never is."""

    def __init__(self, problem: str = "") -> None:
        super().__init__()
        self.done = False
        self.problem = problem

    def ready(self, constraint: Constraint) -> bool:
        if self.done and self.problem:
            raise UnusableConstraint(self.problem)
        return self.done
