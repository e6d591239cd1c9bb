"""Search for good settings: a tree-structured Parzen estimator (optuna) that starts from the present settings.

J. Bergstra, R. Bardenet, Y. Bengio and B. Kégl, "Algorithms for hyper-parameter optimization", NeurIPS 2011.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.lab.tune.space import Settings, Value, feasible


class NoOptuna(RuntimeError):
    """optuna is not installed; the message says what to install."""


class Candidate(NamedTuple):
    """Settings and their score; more is better."""

    settings: dict[str, Value]
    score: float


def search(
    score: Callable[[Settings], float],
    space: Mapping[str, Sequence[Value]],
    present: Settings,
    trials: int,
    seed: int,
    proceed: Callable[[], bool] = lambda: True,
) -> list[Candidate]:
    """All tried settings, best first, including the ``present`` ones.

    The result is deterministic, unless ``proceed`` ends the search early.

    Raises:
        NoOptuna: optuna is missing.
    """
    try:
        import optuna
    except ImportError:
        raise NoOptuna('the search needs optuna: pip install "headrace[tune]"') from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(4, trials // 4))
    study = optuna.create_study(direction="maximize", sampler=sampler)
    study.enqueue_trial({name: list(values).index(present[name]) for name, values in space.items()})
    known: dict[tuple[Value, ...], Candidate] = {}
    for _ in range(trials):
        if known and not proceed():
            break
        trial = study.ask()
        found = _settings(trial, space)
        key = tuple(found.values())
        if key not in known:
            known[key] = Candidate(found, score(found))
        study.tell(trial, known[key].score)
    return sorted(known.values(), key=lambda each: -each.score)


def _settings(trial: Any, space: Mapping[str, Sequence[Value]]) -> dict[str, Value]:
    """The settings that a trial proposes, as indices into ordered values."""
    return feasible(
        {name: values[trial.suggest_int(name, 0, len(values) - 1)] for name, values in space.items()}
    )
