"""``headrace tune``: searches settings in virtual time, and compares the best ones on a held-out part of the workload.

In this order: the `Goal`, the `Parts` of a workload and their windows, the search `space`, the `search` itself (a
tree-structured Parzen estimator that starts from the present settings), the paired comparison (`compare`), and the
commented YAML that a server reads.

J. Bergstra, R. Bardenet, Y. Bengio and B. Kégl, "Algorithms for hyper-parameter optimization", NeurIPS 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from headrace.lab.bench.stats import Record, met_by_target, slo_share, slo_text, times_of
from headrace.lab.workload.work import Call
from headrace.tuning.evidence import Evidence, Interval, NormalSequence

TIE_BREAK = 0.01
"""Value of a time per token that is shorter by a factor of e, as a share of requests; it breaks ties between settings
that meet the targets equally."""


class Goal:
    """``slo`` are latency targets in seconds by quantity (`stats.SLO_NAMES`); empty for the time per token."""

    def __init__(self, slo: Mapping[str, float]) -> None:
        self.slo = dict(slo)

    def value(self, records: Sequence[Record]) -> float:
        """The value to compare; larger is better: a share of requests, or minus the logarithm of the time per token."""
        return slo_share(records, self.slo) if self.slo else -math.log(time_per_token(records))

    def score(self, records: Sequence[Record]) -> float:
        """The value to search for: `value`, with the time per token as tie-break."""
        value = self.value(records)
        return value - TIE_BREAK * math.log(time_per_token(records)) if self.slo else value

    def met(self, records: Sequence[Record]) -> dict[str, float]:
        """The share of requests that met each target alone, 0 to 1."""
        return met_by_target(records, self.slo)

    @property
    def name(self) -> str:
        """The quantity in reports."""
        return "requests within SLO" if self.slo else "time per output token"

    def shown(self, value: float) -> str:
        """A value in reports."""
        return f"{100 * value:.1f} %" if self.slo else f"{1000 * math.exp(-value):.2f} ms"

    def shown_gain(self, difference: float) -> str:
        """A difference in reports; positive is better."""
        if math.isinf(difference):
            return "unknown"
        return (
            f"{100 * difference:+.1f} points" if self.slo else f"{100 * (1 - math.exp(-difference)):+.1f} %"
        )


def time_per_token(records: Sequence[Record]) -> float:
    """Sum of end-to-end seconds divided by output tokens. A failed request counts with the slowest time and no tokens.
    Infinite if all failed."""
    whole = [each for each in records if not each.error]
    tokens = sum(each.output_tokens for each in whole)
    if not tokens:
        return math.inf
    failed = len(records) - len(whole)
    slowest = max(each.e2e for each in whole)
    return (sum(each.e2e for each in whole) + failed * slowest) / tokens


class Impossible(ValueError):
    """Latency targets that no request met with any settings; the message says which, and what was reached."""


def check_possible(slo: Mapping[str, float], records: Sequence[Record]) -> None:
    """Refuses targets that none of these requests met, which ran with many settings.

    Raises:
        Impossible: one target alone was met by no request, or no request met all of them.
    """
    if not slo or slo_share(records, slo) > 0.0:
        return
    for name, share in met_by_target(records, slo).items():
        reached = [
            value for each in records if not each.error and (value := times_of(each)[name]) is not None
        ]
        if share == 0.0 and reached:
            raise Impossible(
                f"{slo_text({name: slo[name]})}: no request met it with any settings that were tried; "
                f"the best was {1000 * min(reached):.3g} ms"
            )
    raise Impossible(f"{slo_text(slo)}: no request met all of them with any settings that were tried")


LEAST_REQUESTS = 8
"""Minimum number of requests of a window; windows with fewer are omitted."""

LEAST_WINDOWS = (4, 2, 8)
"""Minimum number of windows of each part."""

SHARES = (0.4, 0.55)
"""Ends of the first two parts as shares of the time: search, then selection; the rest is held out for evaluation."""


LEAST = 200
"""A sufficient number of requests if they arrive evenly."""


class TooFew(ValueError):
    """A workload with too few requests for tuning; the message says how many it needs."""


class Parts(NamedTuple):
    """The windows of each part; arrivals count from the start of the window."""

    search: list[list[Call]]
    select: list[list[Call]]
    judge: list[list[Call]]


def parts(calls: Sequence[Call], window_seconds: float) -> Parts:
    """The windows of the three parts. A window has ``window_seconds``, or less if the part is short.

    Raises:
        TooFew: a part has fewer windows than `LEAST_WINDOWS` with `LEAST_REQUESTS` requests each.
    """
    until = calls[-1].arrival if calls else 0.0
    bounds = (0.0, *(share * until for share in SHARES), until)
    found = []
    for (low, high), wanted in zip(pairwise(bounds), LEAST_WINDOWS, strict=True):
        mine = [each for each in calls if low <= each.arrival < high or each.arrival == high == until]
        seconds = min(window_seconds, (high - low) / wanted)
        windows = _windows(mine, low, high, seconds) if seconds else []
        if len(windows) < wanted:
            raise TooFew(
                f"the workload has {len(calls)} requests in {until:.0f} s: its parts need {LEAST_WINDOWS} windows of "
                f"{LEAST_REQUESTS} requests, so give at least {LEAST} requests, or longer windows"
            )
        found.append(windows)
    return Parts(*found)


def _windows(calls: Sequence[Call], low: float, high: float, seconds: float) -> list[list[Call]]:
    count = max(1, int((high - low) / seconds + 1e-9))
    windows: list[list[Call]] = [[] for _ in range(count)]
    # If the windows fill the time, its end belongs to the last one; otherwise to the rest that is omitted.
    last = count - 1 if count * seconds > (high - low) * (1 - 1e-9) else count
    for call in calls:
        place = min(int((call.arrival - low) / seconds), last)
        if place < count:
            windows[place].append(call._replace(arrival=call.arrival - low - place * seconds))
    return [each for each in windows if len(each) >= LEAST_REQUESTS]


def spread_out(windows: Sequence[list[Call]], most_requests: int) -> list[list[Call]]:
    """Evenly spaced windows of a part with at most ``most_requests`` in total, but at least one window."""
    for step in range(1, len(windows) + 1):
        chosen = list(windows[::step])
        if sum(map(len, chosen)) <= most_requests:
            return chosen
    return [windows[0]]


Value = int | float
Settings = Mapping[str, Value]
"""Values by the names of the scheduler's options."""

MOST_SLOTS = 256
RATIOS = (0.1, 0.2, 0.4, 0.7, 1.2, 2.5, 5.0, 0.0)
"""Values of ``mixed_prefill_ratio``; 0 means no limit and therefore comes last."""

STEP_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.0)
"""Values of ``max_step_seconds``; 0 means no limit."""

FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)


def space(present: Settings) -> dict[str, list[Value]]:
    """The values of each setting around the ``present`` ones."""
    slots, tokens = present["max_num_seqs"], present["max_num_batched_tokens"]
    return {
        "max_num_seqs": _around(slots, 1, max(MOST_SLOTS, slots)),
        "max_num_batched_tokens": _around(tokens, 16, 1 << 16),
        "mixed_prefill_ratio": _with(RATIOS, present["mixed_prefill_ratio"]),
        "max_step_seconds": _with(STEP_SECONDS, present["max_step_seconds"]),
    }


def feasible(settings: Settings) -> dict[str, Value]:
    """Raises ``max_num_batched_tokens`` to at least ``max_num_seqs``, as the engine requires."""
    tokens = max(settings["max_num_batched_tokens"], settings["max_num_seqs"])
    return {**settings, "max_num_batched_tokens": tokens}


def _around(value: Value, low: Value, high: Value) -> list[Value]:
    return sorted({int(min(high, max(low, value * factor))) for factor in FACTORS})


def _with(values: Sequence[float], present: Value) -> list[Value]:
    """The values and the present one, ascending; 0 (no limit) is last."""
    return sorted({*values, float(present)}, key=lambda each: (each == 0, each))


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


ALPHA = 0.05
"""Maximum probability of recommending settings that are no better, whenever the comparison ends."""

SEQUENCE = NormalSequence(2.0)
"""Settings that a search has found differ by several standard deviations or by nothing, and pairs are few."""


Runner = Callable[[Settings, Sequence[Call]], Sequence[Record]]
"""Runs a window with these settings."""


class Comparison(NamedTuple):
    """The mean values of both sides, and the evidence of their differences in pairs.

    ``met`` is the share of the candidate's requests that met each latency target.
    """

    present: float
    candidate: float
    evidence: Evidence
    met: Mapping[str, float]

    @property
    def interval(self) -> Interval:
        """The interval of the gain at level `ALPHA`."""
        return self.evidence.interval(ALPHA)

    @property
    def better(self) -> bool:
        """Whether the gain is significant."""
        return self.interval.low > 0.0


def compare(
    run: Runner,
    goal: Goal,
    present: Settings,
    candidate: Settings,
    windows: Sequence[Sequence[Call]],
    proceed: Callable[[int], bool],
) -> Comparison:
    """Compares two settings in pairs, each window once, and then again until the evidence decides.

    Both sides of a pair run the same window, in alternating order, so that common noise cancels. It ends earlier when
    ``proceed(pairs)`` is false, but not before the first pair.
    """
    first: list[float] = []
    second: list[float] = []
    judged: list[Record] = []
    evidence = Evidence(SEQUENCE)
    while not first or (proceed(len(first)) and (len(first) < len(windows) or evidence.e_value < 1 / ALPHA)):
        window = windows[len(first) % len(windows)]
        sides = [(present, first), (candidate, second)]
        for settings, values in sides if len(first) % 2 == 0 else reversed(sides):
            records = run(settings, window)
            values.append(goal.value(records))
            if values is second:
                judged += records
        evidence.add(second[-1] - first[-1])
    return Comparison(fmean(first), fmean(second), evidence, goal.met(judged))


def select(
    run: Runner,
    goal: Goal,
    candidates: Sequence[Settings],
    windows: Sequence[Sequence[Call]],
    proceed: Callable[[], bool],
) -> Settings:
    """The settings with the best mean score; all candidates run a window before the next window begins."""
    totals = [0.0] * len(candidates)
    for number, window in enumerate(windows):
        if number and not proceed():
            break
        order = range(len(candidates))
        for place in order if number % 2 == 0 else reversed(order):
            totals[place] += goal.score(run(candidates[place], window))
    return candidates[max(range(len(candidates)), key=lambda place: totals[place])]


def reasons(goal: Goal, found: Comparison | None, met: Mapping[str, float] | None = None) -> list[str]:
    """Why these settings are recommended, or why the present ones are kept, as lines; ``met`` is of the latter."""
    if found is None:
        kept = "No setting was better than the present ones in the simulation; these are the present ones."
        return [kept, *binding(met or {})]
    lines = [
        f"{goal.name}: {goal.shown(found.present)} with the present settings, "
        f"{goal.shown(found.candidate)} with the best ones found.",
        f"Gain: {goal.shown_gain(found.evidence.mean)} (95 % interval {goal.shown_gain(found.interval.low)} to "
        f"{goal.shown_gain(found.interval.high)}, {found.evidence.count} pairs).",
    ]
    lines += binding(found.met)
    if not found.better:
        lines.append("This is within the noise, so nothing is recommended; these are the present settings.")
    return lines


def binding(met: Mapping[str, float]) -> list[str]:
    """Which latency target binds, as a line: the one that the fewest requests meet. Nothing without targets."""
    if not met:
        return []
    shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in met.items())
    name = min(met, key=lambda each: met[each])
    bound = f"{name} binds" if met[name] < 1.0 else "no target binds"
    return [f"Requests that met each target: {shares}; {bound}."]


def settings_text(
    settings: Settings, present: Settings, comments: Sequence[str], fixed: Mapping[str, str]
) -> str:
    """The file's text. ``fixed`` are given options that were not searched."""
    lines = [f"# {each}" for each in comments]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fixed.items()]
    for name, value in settings.items():
        was = f"was {present[name]:g}" if value != present[name] else "unchanged"
        lines.append(f"{name.replace('_', '-') + f': {value:g}':34} # {was}")
    return "\n".join(lines) + "\n"
