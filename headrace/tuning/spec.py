"""The definition of an experiment: one setting, two values, a metric, guards and limits; read from JSON or YAML.

{"setting": "mixed_prefill_ratio", "treatment": 0.4, "metric": "itl_p99_seconds",
 "guards": {"ttft_p99_seconds": 0.2}, "window_seconds": 30, "max_seconds": 7200}

And its power: the smallest detectable change, and the time to detect a change. A change is detected when the interval
around the estimate excludes zero. Since the estimate varies, a change is detected with probability `POWER` if it
exceeds half the interval by that quantile of the estimate's error.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from statistics import NormalDist
from typing import Any, NamedTuple

from headrace.core.request import InvalidParameter
from headrace.tuning.evidence import PAIRS, ConfidenceSequence, units
from headrace.tuning.measures import METRICS, UNIT_METRICS, By, is_share
from headrace.tuning.settings import PER_REQUEST, AnyValue, Setting


class BadExperiment(InvalidParameter):
    """A field of an experiment is missing, unknown or out of range; ``param`` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(param, f"{param}: {message}")


EQUAL_ARMS = 0.5
"""The share of the treatment in an experiment by time, and unless one is given."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A validated experiment definition.

    ``control`` is the current value of the setting. ``unit`` is the unit of assignment, see `measures.By`.
    ``guards`` limit how much worse a metric may become, relatively (0.2: 20 %); for metrics that are shares and are
    compared by request or tenant, the limit is absolute. A window of the whole engine measures ``window_seconds``
    after ``burn_in_seconds``, in which requests of the other arm end and caches settle. A tenant keeps its arm for
    ``window_seconds``. ``share`` of the requests or tenants have the treatment. ``alpha`` bounds the probability of
    a false positive at any stopping time. ``seed`` draws the order of the windows, or the arms. With ``adopt`` the
    setting keeps a better treatment; otherwise it always returns to ``control``.
    """

    setting: str
    control: AnyValue
    treatment: AnyValue
    metric: str
    guards: Mapping[str, float] = field(default_factory=dict)
    window_seconds: float = 30.0
    burn_in_seconds: float = 5.0
    max_seconds: float = 7200.0
    alpha: float = 0.05
    seed: int = 0
    name: str = ""
    adopt: bool = False
    unit: str = By.TIME.value
    share: float = EQUAL_ARMS

    @property
    def pair_seconds(self) -> float:
        """Time of one pair of windows."""
        return 2 * (self.window_seconds + self.burn_in_seconds)


_RANGES: Mapping[str, tuple[float, float]] = {
    "window_seconds": (0.1, 86_400.0),
    "burn_in_seconds": (0.0, 86_400.0),
    "max_seconds": (1.0, 30 * 86_400.0),
    "alpha": (1e-6, 0.5),
    "share": (0.01, 0.99),
}
MOST_GUARD = 10.0
"""Maximum value of a guard."""

MOST_NAME = 200
"""The longest name, in characters."""


def read_spec(body: Any, settings: Mapping[str, Setting], control: Mapping[str, AnyValue]) -> Spec:
    """An experiment from parsed JSON; ``settings`` may change, and ``control`` has their present values.

    Raises:
        BadExperiment: a field is missing, unknown, of another type or out of range.
    """
    if not isinstance(body, dict):
        raise BadExperiment("body", "expected an object")
    known = {each.name for each in fields(Spec)} - {"control"}
    for name in body:
        if name not in known:
            raise BadExperiment(str(name), f"unknown field{_meant(str(name), known)}")
    setting = _one_of(body, "setting", control)
    unit = _unit(body, settings[setting])
    metrics = METRICS if unit is By.TIME else UNIT_METRICS
    metric = _one_of(body, "metric", metrics)
    if "treatment" not in body:
        raise BadExperiment("treatment", "this field is required")
    if body["treatment"] == control[setting]:
        raise BadExperiment("treatment", f"{setting} is {control[setting]} already")
    numbers = {name: _number(body, name, *_RANGES[name]) for name in _RANGES if name in body}
    seed, label, adopt = body.get("seed", 0), body.get("name", ""), body.get("adopt", False)
    if type(seed) is not int:
        raise BadExperiment("seed", "expected an integer")
    if type(adopt) is not bool:
        raise BadExperiment("adopt", "expected true or false")
    if not isinstance(label, str) or len(label) > MOST_NAME:
        raise BadExperiment("name", f"expected text of at most {MOST_NAME} characters")
    spec = Spec(
        setting,
        control[setting],
        body["treatment"],
        metric,
        _guards(body.get("guards", {}), metrics),
        seed=seed,
        name=label,
        adopt=adopt,
        unit=unit.value,
        **numbers,
    )
    if unit is By.TIME and spec.max_seconds < spec.pair_seconds:
        raise BadExperiment("max_seconds", f"one pair of windows takes {spec.pair_seconds:g} s")
    if unit is By.TIME and spec.share != EQUAL_ARMS:
        raise BadExperiment("share", "experiments by time give both values the same time")
    return spec


def read_plan(body: Any) -> Spec:
    """An experiment from parsed JSON without a server; names of settings are not checked.

    Raises:
        BadExperiment: as `read_spec`.
    """
    setting = str(body.get("setting", "")) if isinstance(body, dict) else ""
    if isinstance(body, dict) and "unit" not in body:
        body = body | {"unit": (By.REQUEST if setting in PER_REQUEST else By.TIME).value}
    by_unit = isinstance(body, dict) and body.get("unit") != By.TIME
    known = Setting("", False, 0.0, 0.0, "", per_request=by_unit)
    return read_spec(body, {setting: known}, {setting: math.nan})


def _unit(body: Mapping[str, Any], setting: Setting) -> By:
    """The unit of assignment; the default is request if the setting allows it."""
    if "unit" not in body:
        return By.REQUEST if setting.per_request else By.TIME
    unit = By(_one_of(body, "unit", {each.value: each for each in By}))
    if setting.per_request == (unit is By.TIME):
        fitting = "request or tenant" if setting.per_request else "time: all requests of the engine share it"
        raise BadExperiment("unit", f"{body['setting']} can be compared by {fitting}")
    return unit


def _guards(given: Any, metrics: Mapping[str, Any]) -> dict[str, float]:
    if not isinstance(given, dict):
        raise BadExperiment("guards", "expected an object of metrics and shares")
    for name in given:
        if name not in metrics:
            raise BadExperiment(f"guards.{name}", f"no such metric{_meant(str(name), metrics)}")
    return {
        name: _number({f"guards.{name}": share}, f"guards.{name}", 0.001, MOST_GUARD)
        for name, share in given.items()
    }


def _one_of(body: Mapping[str, Any], name: str, known: Mapping[str, Any]) -> str:
    if name not in body:
        raise BadExperiment(name, f"this field is required: one of {', '.join(known)}")
    value = body[name]
    if not isinstance(value, str) or value not in known:
        raise BadExperiment(name, f"expected one of {', '.join(known)}{_meant(str(value), known)}")
    return value


def _number(body: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value = body[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadExperiment(name, "expected a number")
    if not low <= value <= high:
        raise BadExperiment(name, f"{value} is not between {low:g} and {high:g}")
    return float(value)


def _meant(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


POWER = 0.8
"""Probability of detecting the reported smallest change."""

MOST = 1 << 30
"""Maximum number of units or pairs."""

CHANGES = (0.01, 0.02, 0.05, 0.1, 0.2)
"""The changes of `forecast`."""


class Expected(NamedTuple):
    """A ``change`` is detected after ``needed`` units or pairs, in ``seconds`` (None: not in a reasonable time)."""

    change: float
    needed: int | None
    seconds: float | None


LARGEST = 100.0
"""Maximum logarithm of a detectable change; a larger width means that the number of pairs is too small."""


def smallest_change(count: int, deviation: float, spec: Spec) -> float | None:
    """The smallest change that ``count`` units or pairs of this standard ``deviation`` detect; None if too few.

    ``deviation`` is that of units in equal arms; ``spec.share`` makes it larger.
    """
    if count < _sequence(spec).least:
        return None
    half = deviation * _width(count, spec)
    if half > LARGEST:
        return None
    return half if _plain(spec) else math.expm1(half)


def units_for(change: float, deviation: float, spec: Spec) -> int | None:
    """The number of units or pairs needed to detect a change; None if too many."""
    effect = abs(change) if _plain(spec) else abs(math.log1p(change))
    low, high = _sequence(spec).least, MOST
    if deviation * _width(high, spec) > effect:
        return None
    while low < high:
        middle = (low + high) // 2
        if deviation * _width(middle, spec) <= effect:
            high = middle
        else:
            low = middle + 1
    return low


def forecast(spec: Spec, deviation: float, units_per_second: float | None = None) -> list[Expected]:
    """The time to detect each of `CHANGES`. ``units_per_second`` is not used for pairs of windows."""
    rate = 1.0 / spec.pair_seconds if spec.unit == By.TIME else units_per_second
    found = []
    for change in CHANGES:
        count = units_for(change, deviation, spec)
        found.append(Expected(change, count, None if count is None or not rate else count / rate))
    return found


def to_json(spec: Spec, deviation: float, units_per_second: float | None = None) -> dict[str, Any]:
    """`forecast` and the smallest change by the end of the experiment, as JSON."""
    rate = 1.0 / spec.pair_seconds if spec.unit == By.TIME else units_per_second
    most = int(spec.max_seconds * rate) if rate else None
    return {
        "power": POWER,
        "alpha": spec.alpha,
        "deviation": deviation,
        "most": most,
        "smallest_change": None if most is None else smallest_change(most, deviation, spec),
        "changes": [each._asdict() for each in forecast(spec, deviation, units_per_second)],
    }


def _plain(spec: Spec) -> bool:
    """Whether the change is a difference (of shares), not a ratio."""
    return spec.unit != By.TIME and is_share(spec.metric)


def _sequence(spec: Spec) -> ConfidenceSequence:
    return PAIRS if spec.unit == By.TIME else units(spec.share)


def spread(share: float) -> float:
    """By how much unequal arms increase the standard deviation of a unit; 1 for equal ones."""
    return 0.5 / math.sqrt(share * (1.0 - share))


def _width(count: int, spec: Spec) -> float:
    """The smallest detectable change in standard deviations of equal arms."""
    width = _sequence(spec).half_width(count, spec.alpha) + NormalDist().inv_cdf(POWER) / math.sqrt(count)
    return width * spread(spec.share)
