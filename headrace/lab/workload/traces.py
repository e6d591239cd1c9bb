"""Readers of published traces; the header determines the format.

| trace | header or keys |
|---|---|
| Azure LLM inference 2023 and 2024 | ``TIMESTAMP,ContextTokens,GeneratedTokens`` |
| BurstGPT | ``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type`` |
| Mooncake (JSON lines) | ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (blocks of 512 tokens) |
| ServeGen | ``timestamp_s,input_tokens,output_tokens`` |
| LMSYS arena of the VTC artifact | ``req_time_s,client,prompt_len,output_len`` |

To support another CSV trace, add a `Format`. Calls without a prompt or an output are omitted. Files are streamed, so
memory use does not depend on the length of a trace.
"""

from __future__ import annotations

import csv
import heapq
import json
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple

from headrace.lab.workload.work import Call, Span

MOONCAKE_BLOCK = 512
"""Tokens per hash id in Mooncake's traces; the last block of a prompt may be shorter."""

DISORDER = 4096
"""Number of calls that are buffered to sort slightly disordered lines by arrival."""


class BadTrace(ValueError):
    """A file of an unknown format, or a line that cannot be read; the message names file and line."""


class Format(NamedTuple):
    """The columns of a CSV trace, which identify it; ``clock`` parses an arrival into seconds."""

    arrival: str
    prompt: str
    output: str
    tenant: str = ""
    clock: Callable[[str], float] = float


def _calendar(text: str) -> float:
    """Seconds of a timestamp; without a time zone, as in the 2023 traces, it is UTC."""
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


FORMATS = (
    Format("TIMESTAMP", "ContextTokens", "GeneratedTokens", clock=_calendar),
    Format("Timestamp", "Request tokens", "Response tokens", tenant="Model"),
    Format("timestamp_s", "input_tokens", "output_tokens"),
    Format("req_time_s", "prompt_len", "output_len", tenant="client"),
)


def read_trace(path: Path, limit: int | None = None) -> Iterator[Call]:
    """The first ``limit`` calls of a trace (None: all), in order of arrival, the first at 0.

    Raises:
        BadTrace: an unknown format, a line that cannot be read, or a file that is not UTF-8 text.
        OSError: no such file.
    """
    calls = _from_zero(_in_order(_text(path), path))
    return calls if limit is None else islice(calls, limit)


def _text(path: Path) -> Iterator[Call]:
    try:
        yield from _read(path)
    except UnicodeDecodeError:
        raise BadTrace(f"{path}: the file is not UTF-8 text") from None
    except csv.Error as error:
        raise BadTrace(f"{path}: cannot be read as CSV: {error}") from None


def _read(path: Path) -> Iterator[Call]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        if first.lstrip().startswith("{"):
            yield from _read_json(path, first, file)
            return
        header = [name.strip() for name in next(csv.reader([first]), [])]
        for form in FORMATS:
            if {form.arrival, form.prompt, form.output, form.tenant} - {""} <= set(header):
                yield from _read_csv(path, form, header, file)
                return
    known = "; ".join(f"{form.arrival},{form.prompt},{form.output}" for form in FORMATS)
    raise BadTrace(f"{path}:1: unknown format: expected a header with {known}, or Mooncake's JSON lines")


def _read_csv(path: Path, form: Format, header: list[str], file: IO[str]) -> Iterator[Call]:
    place = {name: i for i, name in enumerate(header)}
    arrival, prompt, output = place[form.arrival], place[form.prompt], place[form.output]
    tenant = place.get(form.tenant)
    for number, row in enumerate(csv.reader(file), start=2):
        if not row:
            continue
        try:
            call = Call(
                _finite(form.clock(row[arrival])),
                _count(row[prompt]),
                _count(row[output]),
                "default" if tenant is None else row[tenant],
            )
        except (ValueError, IndexError, OverflowError) as error:
            raise BadTrace(f"{path}:{number}: {','.join(row)!r:.80} cannot be read: {error}") from None
        if call.prompt_tokens and call.output_tokens:
            yield call


def _read_json(path: Path, first: str, file: IO[str]) -> Iterator[Call]:
    number, line = 1, first
    while line:
        if line.strip():
            try:
                call = _mooncake(json.loads(line))
            except (ValueError, KeyError, TypeError, OverflowError) as error:
                why = f"no field {error}" if isinstance(error, KeyError) else str(error)
                raise BadTrace(f"{path}:{number}: cannot be read: {why}") from None
            if call.prompt_tokens and call.output_tokens:
                yield call
        number, line = number + 1, file.readline()


def _mooncake(row: Mapping[str, Any]) -> Call:
    prompt, output = _count(row["input_length"]), _count(row["output_length"])
    blocks = row["hash_ids"]
    if len(blocks) != -(-prompt // MOONCAKE_BLOCK):
        raise ValueError(f"{prompt} tokens do not make {len(blocks)} blocks of {MOONCAKE_BLOCK}")
    content = tuple(
        Span(int(block), 0, min(MOONCAKE_BLOCK, prompt - i * MOONCAKE_BLOCK))
        for i, block in enumerate(blocks)
    )
    return Call(_finite(float(row["timestamp"])) / 1000.0, prompt, output, content=content)


def _finite(seconds: float) -> float:
    if not math.isfinite(seconds):
        raise ValueError(f"expected a finite time, got {seconds}")
    return seconds


def _count(value: Any) -> int:
    count = int(value)
    if count < 0:
        raise ValueError(f"{count} tokens")
    return count


def _in_order(calls: Iterator[Call], path: Path) -> Iterator[Call]:
    held: list[tuple[float, int, Call]] = []
    latest = float("-inf")
    for number, call in enumerate(calls):
        heapq.heappush(held, (call.arrival, number, call))
        if len(held) > DISORDER:
            latest = _not_before(latest, held[0][0], path)
            yield heapq.heappop(held)[2]
    while held:
        latest = _not_before(latest, held[0][0], path)
        yield heapq.heappop(held)[2]


def _not_before(latest: float, arrival: float, path: Path) -> float:
    if arrival < latest:
        raise BadTrace(
            f"{path}: a line is more than {DISORDER} lines behind its position in time; sort the file by arrival"
        )
    return arrival


def _from_zero(calls: Iterator[Call]) -> Iterator[Call]:
    start: float | None = None
    for call in calls:
        start = call.arrival if start is None else start
        yield call._replace(arrival=call.arrival - start)
