"""The cheapest fleet that meets latency targets: arithmetic orders and prunes, a simulation confirms.

```
 candidates   device x devices per replica x step size         `candidates`; impossible ones with the reason
              x separate prefill and decode replicas, or not
 order        by estimated cost
 each         fewest replicas that meet the targets in simulation (exponential search, then bisection); fleets that
              cost more than the best one so far are skipped
```
Arithmetic gives the minimum number of replicas: with fewer, the queue would grow without limit, which a short
simulation might not show. More replicas are never worse, except by chance in routing, so bisection finds the fewest.
``confirm`` runs a simulation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.lab.forced_acceptance import Speculation
from headrace.lab.plan.capacity import (
    MOST_SEQUENCES,
    Demand,
    Impossible,
    Settings,
    Slo,
    Steady,
    best_steady,
    split_steady,
)
from headrace.lab.plan.roofline import DeviceSpec, ModelShape, Precision, Replica

DEGREES = (1, 2, 4, 8)
BATCHED_TOKENS = (512, 2048, 8192)

GRAIN = 64
"""Large fleets are searched in steps of 1/64 of their size, which is finer than the accuracy of the estimates."""

ROUNDING = 1e-9
"""Tolerance for rounding in a share that was computed from rates."""


class Candidate(NamedTuple):
    """One kind of replica with its settings, and its steady state by arithmetic.

    ``prefill_share`` is the share of prefill replicas (0: no P/D disaggregation).
    """

    replica: Replica
    settings: Settings
    steady: Steady
    prefill_share: float = 0.0


class Fleet(NamedTuple):
    """A number of equal replicas, of which ``prefill_share`` are prefill replicas."""

    replica: Replica
    settings: Settings
    replicas: int
    prefill_share: float = 0.0

    @property
    def prefill(self) -> int:
        """Number of prefill replicas."""
        return prefill_replicas(self.replicas, self.prefill_share)

    @property
    def devices(self) -> int:
        return self.replicas * self.replica.degree

    @property
    def dollars_per_hour(self) -> float:
        return self.replicas * self.replica.dollars_per_hour


class Trial(NamedTuple):
    """Result of simulating a fleet: the share of requests within the targets, and latencies.

    ``error`` is half the width of the 95 % confidence interval of ``attained``. It covers the limited number of
    requests, not the error of the device model.
    """

    attained: float
    ttft_p95: float
    tpot_p95: float
    output_tokens_per_second: float
    preemptions: int
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result. ``best`` is None if no fleet meets the targets; ``refused`` has the reasons against other fleets."""

    best: Fleet | None
    trial: Trial | None
    tried: tuple[tuple[Fleet, Trial], ...]
    refused: tuple[str, ...]


def prefill_replicas(replicas: int, share: float) -> int:
    """The number of prefill replicas for a share; at least one replica of each kind if the share is not 0."""
    return max(1, min(replicas - 1, round(share * replicas))) if share else 0


def degrees(shape: ModelShape, device: DeviceSpec) -> list[int]:
    """Possible tensor-parallel degrees: divisors of the KV heads; only 1 on a CPU server or if layers differ."""
    divided = device.name != "cpu" and shape.sums is None
    return [degree for degree in DEGREES if shape.num_kv_heads % degree == 0 and (degree == 1 or divided)]


def candidates(
    shape: ModelShape,
    devices: Iterable[DeviceSpec],
    precision: Precision,
    demand: Demand,
    slo: Slo,
    block_size: int = 16,
    speculation: Speculation | None = None,
    split: bool = False,
) -> tuple[list[Candidate], list[str]]:
    """All candidates that arithmetic does not exclude, and the reasons for excluding others.

    With ``split``, fleets of prefill and decode replicas are included, but not for models with recurrent states, which
    are not sent to other replicas.
    """
    possible: list[Candidate] = []
    refused: dict[str, None] = {}  # an ordered set of reasons
    for device in devices:
        for degree in degrees(shape, device):
            replica = Replica(shape, device, degree, precision)
            for tokens in BATCHED_TOKENS:
                settings = Settings(min(MOST_SEQUENCES, tokens), tokens, block_size)
                try:
                    best = best_steady(replica, demand, slo, settings, speculation)
                except Impossible as error:
                    refused[str(error)] = None
                    continue
                possible.append(Candidate(replica, settings._replace(max_num_seqs=best.sequences), best))
            if split and not shape.state_bytes and possible and possible[-1].replica == replica:
                possible += _split(possible[-1], demand, slo, speculation)
    return possible, list(refused)


def _split(
    whole: Candidate, demand: Demand, slo: Slo, speculation: Speculation | None
) -> Iterator[Candidate]:
    """The same replicas as prefill and decode pools, at the multiples of 1/`CELL` around the balanced share."""
    settings = whole.settings._replace(
        max_num_seqs=min(MOST_SEQUENCES, whole.settings.max_num_batched_tokens)
    )
    steady, balanced = split_steady(whole.replica, demand, slo, settings, speculation)
    settings = settings._replace(max_num_seqs=steady.sequences)
    for prefill in {max(1, min(CELL - 1, part)) for part in (int(CELL * balanced), int(CELL * balanced) + 1)}:
        share = prefill / CELL
        slower = min(share / balanced, (1 - share) / (1 - balanced))
        rate = steady.requests_per_second * slower
        yield Candidate(whole.replica, settings, steady._replace(requests_per_second=rate), share)


def cheapest(
    possible: Sequence[Candidate],
    refused: Iterable[str],
    demand: Demand,
    slo: Slo,
    confirm: Callable[[Fleet], Trial],
    max_devices: int,
) -> Verdict:
    """The cheapest fleet that meets the latency targets in simulation."""
    best: tuple[Fleet, Trial] | None = None
    tried: list[tuple[Fleet, Trial]] = []
    out = list(refused)
    for candidate in sorted(possible, key=lambda each: _expected_dollars(each, demand)):
        most = max_devices // candidate.replica.degree
        if best is not None:
            cheaper = math.ceil(best[0].dollars_per_hour / candidate.replica.dollars_per_hour) - 1
            most = min(most, cheaper)
        name = _name(candidate)
        start = _expected_replicas(candidate, demand)
        if start > most:
            limit = "would be cheaper than the best" if best is not None else f"fit in {max_devices} devices"
            out.append(f"{name}: needs {start} replicas by arithmetic; {most} {limit}")
            continue
        found = _fewest(candidate, start, most, slo.share, confirm, tried)
        if found is None:
            _, trial = tried[-1]
            out.append(
                f"{name}: {most} replicas serve {100 * trial.attained:.1f} % of the requests within SLO"
            )
        else:
            best = found
    if best is None:
        return Verdict(None, None, tuple(tried), tuple(out))
    return Verdict(*best, tuple(tried), tuple(out))


def _expected_replicas(candidate: Candidate, demand: Demand) -> int:
    least = 2 if candidate.prefill_share else 1
    return max(least, math.ceil(demand.requests_per_second / candidate.steady.requests_per_second))


def _expected_dollars(candidate: Candidate, demand: Demand) -> float:
    return _expected_replicas(candidate, demand) * candidate.replica.dollars_per_hour


def _fewest(
    candidate: Candidate,
    start: int,
    most: int,
    share: float,
    confirm: Callable[[Fleet], Trial],
    tried: list[tuple[Fleet, Trial]],
) -> tuple[Fleet, Trial] | None:
    """The fewest replicas from ``start`` to ``most`` that meet the targets, by exponential search.

    For large fleets, the result is within 1/`GRAIN` of the fewest.
    """
    failed, passed, stride = start - 1, 0, max(1, start // GRAIN)
    found: tuple[Fleet, Trial] | None = None
    while found is None or passed - failed > max(1, passed // GRAIN):
        replicas = (passed + failed) // 2 if found else min(most, failed + stride)
        fleet = Fleet(candidate.replica, candidate.settings, replicas, candidate.prefill_share)
        trial = confirm(fleet)
        tried.append((fleet, trial))
        if trial.attained >= share - ROUNDING:
            found, passed = (fleet, trial), replicas
        elif replicas == most:
            return None
        else:
            failed, stride = replicas, 2 * stride
    return found


def _name(candidate: Candidate) -> str:
    replica, tokens = candidate.replica, candidate.settings.max_num_batched_tokens
    pools = f", {100 * candidate.prefill_share:g} % for prefill" if candidate.prefill_share else ""
    return f"{replica.degree} x {replica.device.name}, {tokens} batched tokens{pools}"


CELL = 8
"""Maximum number of simulated replicas."""

BATCHES = 10
"""Number of batches for the method of batch means. Requests within a batch are correlated: they share a queue."""

STUDENT = 2.262
"""The 97.5 % quantile of Student's t distribution with `BATCHES` - 1 degrees of freedom."""


def simulated_replicas(replicas: int) -> int:
    """Number of replicas of a fleet that are simulated."""
    return min(replicas, CELL)


def error_bound(met: Sequence[bool]) -> float:
    """Half the width of the 95 % confidence interval of the share of requests that met a target (batch means).

    ``met`` has a value per request, in order of arrival. The result is infinite with fewer than `BATCHES` requests.
    """
    size = len(met) // BATCHES
    if not size:
        return math.inf
    shares = [sum(met[i * size : (i + 1) * size]) / size for i in range(BATCHES)]
    mean = sum(shares) / BATCHES
    variance = sum((share - mean) ** 2 for share in shares) / (BATCHES - 1)
    return STUDENT * math.sqrt(variance / BATCHES)


CONFIDENCE = 0.999
"""Share of time in which enough replicas must be available."""

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Supply:
    """Prices and failure rates of the machines.

    ``spot_share`` of the replicas run on spot machines, at ``spot_price`` times the on-demand price, with
    ``spot_interruptions`` per hour each. Every replica has ``failures`` per hour. ``recovery_seconds`` include loading
    the weights.
    """

    spot_share: float = 0.0
    spot_price: float = 0.4
    spot_interruptions: float = 0.05
    failures: float = 0.0
    recovery_seconds: float = 300.0

    @property
    def price(self) -> float:
        """The mean price of a replica as a share of the on-demand price."""
        return 1.0 - self.spot_share * (1.0 - self.spot_price)

    def away(self, replicas: int) -> float:
        """Mean number of unavailable replicas."""
        losses = self.failures + self.spot_share * self.spot_interruptions
        return replicas * _away(losses * self.recovery_seconds / HOUR)

    def replicas(self, needed: int) -> int:
        """The fewest replicas of which ``needed`` are available for `CONFIDENCE` of the time."""
        total = needed
        while total - _quantile(self.away(total)) < needed:
            total = needed + _quantile(self.away(total))
        return total


ON_DEMAND = Supply()
"""On-demand machines that never fail."""


def _away(mean_losses: float) -> float:
    """Unavailable share of time of a replica, from its mean number of losses per recovery time."""
    return mean_losses / (1.0 + mean_losses)


def _quantile(mean: float) -> int:
    """The smallest number that a Poisson variable does not exceed with the probability `CONFIDENCE`."""
    count, below = -1, 0.0
    while below < CONFIDENCE:
        count += 1
        below += math.exp(count * math.log(mean) - mean - math.lgamma(count + 1)) if mean else 1.0
    return count
