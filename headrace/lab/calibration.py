"""Step times of a measured machine: a few coefficients, fitted once and stored in a small file.

```
 device  step + row·rows + sum over ranges of tokens_i·(tokens in range i)
              + context·contexts + read·read_tokens + sample·samples
 host    step + row·rows                                       (planning, packing, events)
 front   step + event·samples, of a step that samples          (writing the output of the step before)
```
The cost of one more token depends on their number: with few tokens a step is bound by reading the weights, with many by
arithmetic. So each range of tokens has its own cost per token. `fit` finds the coefficients.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.core.events import Finished
from headrace.core.plan import StepOutput, StepPlan
from headrace.core.ports import Runner
from headrace.core.request import Request, SamplingParams
from headrace.files import replace_text
from headrace.lab.bench.engine import Loop
from headrace.lab.bench.stats import Record, Target, median
from headrace.lab.simulate.runner import Front, StepWork, work_of
from headrace.lab.workload.dataset import VOCABULARY
from headrace.lab.workload.population import log_normal
from headrace.lab.workload.work import Work

BENDS = (0, 8, 32, 128, 512)
"""Numbers of tokens of a step at which the cost of one more token changes."""

_SECONDS = (
    *("step", "row", "context", "read", "sample", "host_step", "host_row"),
    *(
        "front_request",
        "front_step",
        "front_event",
        "front_stall",
        "front_token",
        "front_wake",
        "front_busy",
    ),
)
_RANGES = tuple(pairwise((*BENDS, 1 << 62)))


class BadCalibration(ValueError):
    """A file that is not a calibration, or too few measurements."""


def features(work: StepWork) -> tuple[int, ...]:
    """The factors of the device's coefficients, in the order of `Calibration.device`."""
    tokens = work.tokens
    return (
        1,
        work.rows,
        *[min(tokens, end) - start if tokens > start else 0 for start, end in _RANGES],
        work.contexts,
        work.read_tokens,
        work.samples,
    )


def device_seconds(coefficients: tuple[float, ...], work: StepWork) -> float:
    """The device's time for a step; the coefficients are those of `Calibration.device`."""
    seconds: float = sum(map(mul, coefficients, features(work)))
    return seconds


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of the time of a step in seconds, and the percentiles of their relative error on the measured steps.

    ``tokens`` are the costs of one more token from each of `BENDS` on.
    """

    step: float
    row: float
    tokens: tuple[float, ...]
    context: float
    read: float
    sample: float
    host_step: float
    host_row: float
    error_p50: float
    error_p90: float

    @property
    def device(self) -> tuple[float, ...]:
        """The device's coefficients, in the order of `features`."""
        return (self.step, self.row, *self.tokens, self.context, self.read, self.sample)

    def prompt_seconds(self, tokens: int) -> float:
        """Seconds of a step that computes one prompt alone, including the host's part."""
        return self._seconds(StepWork(1, tokens, tokens * (tokens + 1) // 2, tokens, 1))

    def decode_seconds(self, rows: int, context: int) -> float:
        """Seconds of a decode step of ``rows`` sequences with ``context`` tokens each, including the host's part."""
        return self._seconds(StepWork(rows, rows, rows * context, rows * context, rows))

    def _seconds(self, work: StepWork) -> float:
        return device_seconds(self.device, work) + self.host_step + self.host_row * work.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(Fit):
    """Step times of a machine that runs a model, in seconds.

    ``kind`` (``cpu`` or ``cuda``) chooses the engine's defaults, ``fixed_tokens`` and ``context_tokens`` are its
    `StepCost`, ``kv_tokens`` is the capacity of its KV cache. Of a model with recurrent states, ``state_bytes`` are
    those of a sequence, and ``state_cells`` counts the checkpoints.

    ``front_request``, ``front_token``, ``front_event``, ``front_stall``, ``front_wake`` and ``front_busy`` are those of
    `Front`. Writing the output of a step also delays the next step, because both share an interpreter and cores: by
    ``front_step`` seconds per step, and by ``front_event`` seconds per chunk.
    """

    model: str
    machine: str
    kind: str
    dtype: str
    kernels: str
    kv_tokens: int
    max_model_len: int
    fixed_tokens: float
    context_tokens: float
    steps: int
    front_request: float = 0.0
    front_step: float = 0.0
    front_event: float = 0.0
    front_stall: float = 0.0
    front_token: float = 0.0
    front_wake: float = 0.0
    front_busy: float = 0.0
    state_bytes: int = 0
    state_cells: int = 0

    def front(self) -> Front:
        """The measured HTTP overhead of a server."""
        return Front(
            self.front_request,
            self.front_event,
            self.front_stall,
            self.front_token,
            self.front_wake,
            self.front_busy,
        )

    def at(self, pace: float) -> Calibration:
        """The calibration of a machine that takes ``pace`` times as long for everything."""
        slower = {name: pace * getattr(self, name) for name in _SECONDS}
        return dataclasses.replace(self, tokens=tuple(pace * each for each in self.tokens), **slower)

    def write(self, path: Path) -> None:
        replace_text(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def read_file(cls, path: Path) -> Calibration:
        """Reads a file that `write` wrote.

        Raises:
            BadCalibration: the file lacks a field, has an unknown one or a value of the wrong kind.
            OSError: no such file.
        """
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise BadCalibration(f"{path} is not valid JSON: {error}") from None
        known = {each.name: str(each.type) for each in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known.keys():
            raise BadCalibration(f"{path} is not a calibration; make one with: headrace bench calibrate")
        for name, value in values.items():
            if not _fits(value, known[name]):
                raise BadCalibration(f"{path}: {name} must be {known[name]}, got {value!r:.80}")
        if "tokens" in values:
            values["tokens"] = tuple(values["tokens"])
        try:
            return cls(**values)
        except TypeError as error:
            raise BadCalibration(f"{path}: {error}") from None


def _fits(value: Any, kind: str) -> bool:
    if kind == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if kind.startswith("tuple"):
        return (
            isinstance(value, list)
            and len(value) == len(BENDS)
            and all(_fits(each, "float") for each in value)
        )
    return type(value).__name__ == kind and (kind != "int" or value >= 0)


class Calibrated:
    """A `Device` with the measured step times; moving blocks or states takes no extra time."""

    def __init__(self, calibration: Calibration) -> None:
        c = calibration
        self._device = c.device
        self._host_step, self._host_row = c.host_step, c.host_row
        self._front_step, self._front_event = c.front_step, c.front_event

    def seconds(self, work: StepWork) -> float:
        return device_seconds(self._device, work)

    def host_seconds(self, work: StepWork) -> float:
        seconds = self._host_step + self._host_row * work.rows
        if not work.samples:
            return seconds
        return seconds + self._front_step + self._front_event * work.samples


LEAST_STEPS = 30
"""Minimum number of measured steps."""

_TOLERATED = 1.345
"""Huber's threshold in standard deviations: 95 % as efficient as least squares on normal errors."""

_REWEIGHTINGS = 30


class Measured(NamedTuple):
    """One step of a real runner: its work, device seconds, and host seconds before it (NaN after a pause)."""

    work: StepWork
    seconds: float
    host_seconds: float


def fit(measured: Sequence[Measured]) -> Fit:
    """Fits the coefficients to measured steps.

    Raises:
        BadCalibration: fewer than `LEAST_STEPS` steps.
    """
    if len(measured) < LEAST_STEPS:
        raise BadCalibration(f"{len(measured)} steps were measured; at least {LEAST_STEPS} are needed")
    sums = np.array([features(each.work) for each in measured], dtype=np.float64)
    device, errors = _robust(sums, np.array([each.seconds for each in measured]))
    hosts = [each for each in measured if math.isfinite(each.host_seconds)]
    host_features = np.array([(1, each.work.rows) for each in hosts], dtype=np.float64)
    host, _ = _robust(host_features, np.array([each.host_seconds for each in hosts]))
    p50, p90 = np.percentile(np.abs(errors), [50.0, 90.0])
    step, row, *tokens, context, read, sample = device.tolist()
    host_step, host_row = host.tolist()
    return Fit(
        *(step, row, tuple(tokens), context, read, sample, host_step, host_row),
        error_p50=float(p50),
        error_p90=float(p90),
    )


Floats = npt.NDArray[np.float64]


def _robust(sums: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Coefficients of at least 0, and the relative errors of their predictions.

    An error is divided by the geometric mean of prediction and measurement, which approximates the difference of their
    logarithms: factors of 2 and 1/2 weigh the same.
    """
    columns = sums.max(axis=0)
    columns[columns == 0.0] = 1.0
    sums = sums / columns
    predicted, weights = seconds, np.ones(len(seconds))
    for _ in range(_REWEIGHTINGS):
        scale = np.sqrt(seconds * np.maximum(predicted, 0.01 * seconds))
        found = non_negative(sums * (weights / scale)[:, None], weights * seconds / scale)
        predicted = sums @ found
        errors = np.abs(predicted - seconds) / scale
        tolerated = _TOLERATED * 1.4826 * np.median(errors) + 1e-9
        weights = np.sqrt(np.minimum(1.0, tolerated / np.maximum(errors, 1e-12)))
    return found / columns, predicted / seconds - 1.0


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Least squares with all unknowns at least 0 (Lawson and Hanson, 1974, chapter 23)."""
    count = matrix.shape[1]
    found, free = np.zeros(count), np.zeros(count, dtype=bool)
    for _ in range(3 * count):
        pull = matrix.T @ (target - matrix @ found)
        pull[free] = 0.0
        if pull.max() <= 1e-10 * len(target):
            break
        free[int(pull.argmax())] = True
        while True:
            wanted = np.zeros(count)
            wanted[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            below = free & (wanted <= 0.0)
            if not below.any():
                found = wanted
                break
            step = (found[below] / (found[below] - wanted[below])).min()
            found = found + step * (wanted - found)
            free &= found > 1e-15
            found[~free] = 0.0
    return found


# Measurements for a calibration: steps of an engine in this process, and the HTTP overhead of a server.

ANSWER_MEDIAN = 24
"""Median output tokens. Outputs are short, so that most steps have both prefill and decode rows, as in a server."""

STREAM_TOKENS = 96
VISITS, VISITED_TOKENS = 12, 288
"""Number of visits (single short requests while streams run), and tokens of a stream then: few visits overlap."""

VISIT_TOKENS = (16, 256)
"""Prompt tokens of short and long visits; long ones run without streams, and have at most half of the context."""

LONE_VISITS, LONE_TOKENS, LONE_GAP, LONE_TIMES = 8, 24, 0.03, 1.3
"""Visits without streams: their number and output tokens. The interval between two is ``LONE_GAP`` seconds plus
``LONE_TIMES`` times the duration of one, so that each finds the server idle."""

VISITED = 4
"""Maximum number of streams during visits."""

ALONE = 2
"""How often a single stream runs in a turn, in server and engine; one run gives only one TPOT."""

TURNS = 5
"""How often all batch sizes and the HTTP overhead are measured, in alternation, so that drift of the machine affects
all of them equally."""


class Group(NamedTuple):
    """Requests, and how many of them are open at once."""

    open_at_once: int
    requests: Sequence[Request]


def groups(max_num_seqs: int, max_model_len: int, seed: int = 0, turn: int = 0) -> Iterator[Group]:
    """Closed loops of 1, 2, 4 … ``max_num_seqs`` concurrent requests, in descending order in every second turn. Prompts
    and outputs have many lengths and share no prefix. The first group, of the largest size, warms up the engine.
    """
    rng = random.Random(f"{seed} {turn}")
    longest = max(1, max_model_len // 2)
    up = [1]
    while up[-1] < max_num_seqs:
        up.append(min(2 * up[-1], max_num_seqs))
    for number, size in enumerate([max_num_seqs, *(up, up[::-1])[turn % 2]]):
        requests = [
            Request(
                f"calibrate-{turn}-{number}-{i}",
                prompt,
                SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True),
            )
            for i, (prompt, answer) in enumerate(_drawn(2 + size, longest, rng))
        ]
        yield Group(size, requests)


def _drawn(count: int, longest: int, rng: random.Random) -> Iterator[tuple[tuple[int, ...], int]]:
    """Prompts, and the lengths of their outputs."""
    prompts = log_normal(count, max(1, min(192, longest // 8)), 1.0, 1, longest, rng)
    answers = log_normal(count, ANSWER_MEDIAN, 0.7, 4, max(4, min(256, longest)), rng)
    for prompt, answer in zip(prompts, answers, strict=True):
        yield tuple(rng.choices(VOCABULARY, k=prompt)), answer


def measure_steps(
    loop: Loop,
    recorder: StepRecorder,
    groups: Iterable[Group],
    before: Callable[[], object],
) -> list[Measured]:
    """Runs one group after the other through an engine whose runner is wrapped by ``recorder``; returns their steps.

    ``before`` is called before each group and must clear the prefix cache. Otherwise, new blocks would come from memory
    that was never used, and the system would zero its pages during steps. The first group is excluded for that reason.
    """
    for number, group in enumerate(groups):
        if number == 1:
            recorder.measured.clear()
        before()
        recorder.pause()
        to_come, open_ = deque(group.requests), 0
        while to_come or open_:
            while to_come and open_ < group.open_at_once:
                loop.submit(to_come.popleft(), time.monotonic())
                open_ += 1
            open_ -= sum(type(event) is Finished for event in loop.step(time.monotonic()))
    return list(recorder.measured)


def visits(seconds: float, turn: int = 0) -> list[Work]:
    """Single requests with short prompts, one after the other, spread over about ``seconds``."""
    rng = random.Random(2 * turn)
    return [
        Work(
            f"visit{i}",
            tuple(rng.choices(VOCABULARY, k=VISIT_TOKENS[0])),
            2,
            arrival=seconds * (0.05 + 0.85 * (i + 0.3 * rng.random()) / VISITS),
            ignore_eos=True,
        )
        for i in range(VISITS)
    ]


def lone_visits(gap: float, tokens: Sequence[int], turn: int = 0) -> list[Work]:
    """Requests with prompts of ``tokens`` in turn and short outputs, about ``gap`` seconds apart."""
    rng = random.Random(f"lone {turn}")
    return [
        Work(
            f"lone{i}",
            tuple(rng.choices(VOCABULARY, k=tokens[i % 2])),
            LONE_TOKENS,
            arrival=gap * (i + 0.2 * rng.random()),
            ignore_eos=True,
        )
        for i in range(LONE_VISITS)
    ]


def stream_work(streams: int, turn: int = 0, tokens: int = STREAM_TOKENS) -> list[Work]:
    """Equal long outputs that decode concurrently."""
    rng = random.Random(2 * turn + 1)
    return [
        Work(f"stream{i}", tuple(rng.choices(VOCABULARY, k=16)), tokens, ignore_eos=True)
        for i in range(streams)
    ]


def busy_work(streams: int, max_model_len: int, turn: int = 0) -> list[Work]:
    """Requests with lengths as in `groups`, twice as many as ``streams``, which keep the batch full."""
    rng = random.Random(f"busy {turn}")
    drawn = _drawn(2 * streams, max(1, max_model_len // 2), rng)
    return [Work(f"busy{i}", prompt, answer, ignore_eos=True) for i, (prompt, answer) in enumerate(drawn)]


class FrontSeconds(NamedTuple):
    """HTTP overhead in seconds: per ``request`` and prompt ``token``, per ``step`` that emits tokens, and per ``event``
    (chunk of a response). A request that arrives during a step delays the step's end by ``stall``, and costs ``busy``
    instead of ``request``. A request that finds the server idle delays the step after its first token by ``wake``."""

    request: float = 0.0
    token: float = 0.0
    step: float = 0.0
    event: float = 0.0
    stall: float = 0.0
    wake: float = 0.0
    busy: float = 0.0


class _Turn(NamedTuple):
    """One turn, in seconds: TTFT of lone visits with short and long prompts, and how much longer their TPOT is than a
    stream's; ``added``, ``beside`` and ``longer``, the differences between server and engine in the TPOT by number of
    streams, in the TTFT of visits during streams and in the duration of a full batch; and that batch's steps and
    tokens."""

    ttft: tuple[float, float]
    woken: float
    added: Sequence[float]
    beside: float
    longer: float
    steps: int
    tokens: int


class FrontMeasure:
    """HTTP overhead: a server's times compared with the fitted step times, or with the same work in an engine alone.

    Both targets must clear their prefix cache before each run. Server and engine compute the same streams directly one
    after the other: what HTTP adds to a step is less than the drift of a machine within a minute. Comparing one stream
    with many separates this from the cost of each chunk: a step wakes sockets, threads and the client, however few
    tokens it emits. The remaining extra time of a full batch is the delay caused by its requests, at most their cost on
    an idle server: the time of a batch of long steps varies by more. Visits during streams are short, because each
    scheduler divides long prompts by the step times that it has learned. On an idle server, a request's cost is the
    delay of its first token beyond the fit, and the delay of its other tokens beyond those of a long stream; it
    includes waking up threads and cores.

    Raises:
        RuntimeError: a request failed.
    """

    def __init__(self, server: Target, engine: Target, streams: int, max_model_len: int) -> None:
        self._server, self._engine = server, engine
        self._streams, self._length = streams, max_model_len
        self._visited = max(1, min(VISITED, streams // 2))
        self._sizes = sorted({1, self._visited, streams})
        longest = max(VISIT_TOKENS[0] + 1, min(VISIT_TOKENS[1], max_model_len // 2))
        self._prompts = (VISIT_TOKENS[0], longest)
        self._turns: list[_Turn] = []
        self._visited_tokens = min(VISITED_TOKENS, max_model_len // 2)
        engine.run(stream_work(self._visited, -1))
        server.run(stream_work(self._visited, -1))  # warm-up: connections and first calls
        server.run(busy_work(streams, max_model_len, -1))  # warm-up: touches memory that was never used

    def turn(self, found: Fit) -> None:
        """Measures everything once."""
        server, engine, turn = self._server, self._engine, len(self._turns)
        busy = found.prompt_seconds(self._prompts[1]) + LONE_TOKENS * found.decode_seconds(1, LONE_TOKENS)
        lone = server.run(lone_visits(LONE_GAP + LONE_TIMES * busy, self._prompts, turn))
        pairs = [
            [
                [_tpot(target.run(stream_work(size, turn))) for target in (server, engine)]
                for _ in range(ALONE if size == 1 else 1)
            ]
            for size in self._sizes
        ]
        seconds = pairs[self._sizes.index(self._visited)][0][0] * self._visited_tokens
        among = stream_work(self._visited, turn, self._visited_tokens) + visits(seconds, turn)
        beside = [_ttfts(target.run(among)[self._visited :]) for target in (server, engine)]
        mixed = busy_work(self._streams, self._length, turn)
        served, computed = _whole(server.run(mixed)), _whole(engine.run(mixed))
        self._turns.append(
            _Turn(
                (_ttft(lone[::2]), _ttft(lone[1::2])),
                _tpot(lone) - median([served for served, _ in pairs[0]]),
                [median([served - computed for served, computed in each]) for each in pairs],
                median([late - early for late, early in zip(*beside, strict=True)]),
                _seconds(served) - _seconds(computed),
                len({seconds for record in computed for seconds in record.token_seconds}),
                sum(record.output_tokens for record in computed),
            )
        )

    def seconds(self, found: Fit) -> FrontSeconds:
        """The HTTP overhead from the medians over all turns and the fitted step times."""
        turns = self._turns
        context = VISIT_TOKENS[0] + STREAM_TOKENS // 2
        added = np.array([median(each) for each in zip(*(turn.added for turn in turns), strict=True)])
        fitted = np.array([found.decode_seconds(size, context) for size in self._sizes])
        factors = np.array([(1, size) for size in self._sizes])
        if len(self._sizes) == 1:
            factors = factors[:, :1]
        written = non_negative(factors / fitted[:, None], added / fitted)
        step, event = (*written.tolist(), 0.0)[:2]
        requests = 2 * self._streams
        stall = median([(turn.longer - turn.steps * step - turn.tokens * event) / requests for turn in turns])
        waits = [median([turn.ttft[i] for turn in turns]) - step - event for i in range(2)]
        short, long = (
            max(0.0, wait - found.prompt_seconds(tokens))
            for wait, tokens in zip(waits, self._prompts, strict=True)
        )
        token = max(0.0, long - short) / (self._prompts[1] - self._prompts[0])
        request = max(0.0, short - self._prompts[0] * token)
        lone = found.decode_seconds(1, sum(self._prompts) // 2) - found.decode_seconds(1, context)
        explained = step + (self._visited + 1) * event + self._prompts[0] * token
        busy = median([turn.beside for turn in turns]) - explained
        wake = (median([turn.woken for turn in turns]) - lone) * (LONE_TOKENS - 1)
        terms = (request, token, step, event, min(stall, request), wake, busy)
        return FrontSeconds(*(max(0.0, seconds) for seconds in terms))


def _seconds(records: Sequence[Record]) -> float:
    return max(record.finished for record in records) - min(record.arrived for record in records)


def _ttft(records: Sequence[Record]) -> float:
    return median(_ttfts(records))


def _ttfts(records: Sequence[Record]) -> list[float]:
    return [record.ttft for record in _whole(records) if record.ttft is not None]


def _tpot(records: Sequence[Record]) -> float:
    return median([record.tpot for record in _whole(records) if record.tpot is not None])


def _whole(records: Sequence[Record]) -> Sequence[Record]:
    failed = next((record for record in records if record.error), None)
    if failed is not None:
        raise RuntimeError(f"{failed.id}: {failed.error}")
    return records


class StepRecorder:
    """A `core.ports.Runner` that forwards all calls; ``measured`` has an entry per step.

    A step lasts from its launch, or from the end of the previous step if that is later (overlap), to the end of its
    collection. The host's seconds run from the end of a collection to the next launch; call `pause` if the engine was
    idle in between.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float] = time.perf_counter) -> None:
        self.measured: list[Measured] = []
        self._runner = runner
        self._clock = clock
        self._launched: deque[tuple[StepWork, float, float]] = deque()
        self._ended = math.nan

    def pause(self) -> None:
        """The next step does not directly follow the last one."""
        self._ended = math.nan

    def launch(self, plan: StepPlan, now: float) -> None:
        began = self._clock()
        host = math.nan if self._launched else began - self._ended
        self._launched.append((work_of(plan), began, host))
        self._runner.launch(plan, now)

    def collect(self) -> StepOutput:
        output = self._runner.collect()
        ended = self._clock()
        work, began, host = self._launched.popleft()
        before = self._ended if self._ended == self._ended else began
        self.measured.append(Measured(work, ended - max(began, before), host))
        self._ended = ended
        return output
