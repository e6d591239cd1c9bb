"""The file of a trace: keyed hashes of tokens, its lines, and its writer.

Hashes reveal only which prefixes are equal. The fingerprint of a token hashes the token and everything before it (salt
and adapter first) with a random key, which is never written. Two prompts have equal fingerprints exactly for their
common prefix. It is per token, because the prefix cache also copies parts of blocks. Without the key, a guessed prompt
cannot be verified.
"""

from __future__ import annotations

import base64
import fcntl
import gzip
import hashlib
import json
import logging
import math
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple

from headrace.core.block_keys import root_key
from headrace.core.drafting.proposal import Proposal
from headrace.core.events import Emitted, Event, Finished
from headrace.core.images import contents, encoded
from headrace.core.knobs import Knobs
from headrace.core.plan import Arrival
from headrace.core.request import FinishReason, Request
from headrace.files import private_opener

logger = logging.getLogger("headrace.recording")

# The entries of a trace: every input of an engine in order, and each step with its events.
#
# Replaying the inputs at the recorded times produces the same events: the core has no clock and no
# randomness, and the outputs of its runner are recorded too.


class Begun(NamedTuple):
    """The engine was built; it can be rebuilt from ``settings``, which are plain values."""

    version: str
    settings: Mapping[str, Any]


class Submitted(NamedTuple):
    """A request was submitted."""

    request: Request
    now: float


class Cancelled(NamedTuple):
    """A request was cancelled."""

    request_id: str
    why: FinishReason
    now: float


class Turned(NamedTuple):
    """The scheduler's settings changed before the next step."""

    knobs: Knobs


class Adopted(NamedTuple):
    """Blocks of an earlier engine's cache were loaded; their content is not recorded."""

    blocks: int


class Reset(NamedTuple):
    """The prefix cache was emptied; also in the lower tiers if ``lower``."""

    lower: bool


class Spent(NamedTuple):
    """Other work took so many seconds of the prefill time of the next step."""

    seconds: float


class Background(NamedTuple):
    """So many works more went on beside steps; less, if negative."""

    change: int


class Outcome(NamedTuple):
    """The shape of the runner's output of one step; the first three fields are keyed by row index.

    ``counts`` are numbers of sampled tokens, for rows that did not sample exactly one. ``scores`` are numbers of scored
    prompt positions, ``failures`` error messages, ``arrivals`` finished disk transfers. ``broken_off``: the step was
    interrupted and computed no row.
    """

    counts: Mapping[int, int]
    scores: Mapping[int, int]
    failures: Mapping[int, str]
    arrivals: tuple[Arrival, ...] = ()
    broken_off: bool = False


class Drafts(NamedTuple):
    """The drafter's activity since the previous step: an input, because it may depend on tokens and clocks.

    ``proposals`` are by request. ``seconds`` of device time are not part of the step. ``failed`` is the call that
    raised an error (0: `draft`, else the number of the other call), the error's type and its message.
    """

    proposals: Mapping[str, Proposal]
    seconds: float = 0.0
    failed: tuple[int, str, str] | None = None


class Took(NamedTuple):
    """One call of `Engine.step`: its time, duration, collected output (None: nothing was collected) and events.

    ``drafts`` is None if nothing was drafted.
    """

    now: float
    seconds: float
    outcome: Outcome | None
    events: tuple[Event, ...]
    drafts: Drafts | None = None


class Drained(NamedTuple):
    """Events that were emitted between two steps."""

    events: tuple[Event, ...]


class Raised(NamedTuple):
    """A step raised an error, which ended the engine."""

    now: float
    error: str


Moment = (
    Begun | Adopted | Submitted | Cancelled | Turned | Reset | Spent | Background | Took | Drained | Raised
)


SIZE = 3
"""Bytes of a fingerprint; different tokens after the same prefix collide with a probability of 1 in 16 million."""

STOP = 0
"""The fingerprint of every token that ends an output; no other fingerprint is 0."""


def written(fingerprints: Iterable[int]) -> str:
    """Encode fingerprints as text, four characters each."""
    return base64.b64encode(b"".join(value.to_bytes(SIZE, "big") for value in fingerprints)).decode()


def read(text: str) -> tuple[int, ...]:
    """Decode the text of `written`.

    Raises:
        ValueError: the text is not a list of fingerprints.
    """
    raw = base64.b64decode(text, validate=True)
    if len(raw) % SIZE:
        raise ValueError(f"{len(raw)} bytes are not a whole number of fingerprints")
    return tuple(int.from_bytes(raw[i : i + SIZE], "big") for i in range(0, len(raw), SIZE))


class _Chain:
    """The running hash of one request, and the tokens that end its output."""

    __slots__ = ("hash", "holders", "stops")

    def __init__(self, request: Request, key: bytes) -> None:
        self.hash = hashlib.blake2b(root_key(request.salt, request.adapter), digest_size=SIZE, key=key)
        self.stops = frozenset(request.params.stop_token_ids)
        if not request.params.ignore_eos:
            self.stops |= request.eos_token_ids
        self.holders = 0

    def extend(self, tokens: Iterable[int], stops: frozenset[int] = frozenset()) -> tuple[int, ...]:
        values = []
        for token in tokens:
            self.hash.update(token.to_bytes(8, "little") if token >= 0 else encoded((token,)))
            value = int.from_bytes(self.hash.digest(), "big") or 1
            values.append(STOP if token in stops else value)
        return tuple(values)


class Fingerprints:
    """The fingerprints of all open requests of one engine; ``key`` is the secret of the recording, up to 64 bytes."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._chains: dict[str, _Chain] = {}

    def begin(self, request: Request) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Fingerprints of a new request's prompt, and of output tokens that it was submitted with.

        A second request with the same id changes nothing, since the engine rejects it.
        """
        chain = _Chain(request, self._key)
        prompt = contents(request.tokens, request.images)
        shown = chain.extend(prompt), chain.extend(request.answered, chain.stops)
        self._chains.setdefault(request.id, chain).holders += 1
        return shown

    def answer(self, request_id: str, tokens: Iterable[int]) -> tuple[int, ...]:
        """Fingerprints of the next output tokens; a token that ends the output is `STOP`."""
        chain = self._chains[request_id]
        return chain.extend(tokens, chain.stops)

    def first_end(self, request_id: str, tokens: Sequence[int]) -> int | None:
        """Index of the first of ``tokens`` that ends the output; None if none does."""
        stops = self._chains[request_id].stops
        return next((place for place, token in enumerate(tokens) if token in stops), None)

    def group(self, name: str) -> str:
        """A keyed hash of the name of a request group, which a client chose; empty for no group."""
        return hashlib.blake2b(name.encode(), digest_size=8, key=self._key).hexdigest() if name else ""

    def end(self, request_id: str) -> None:
        """Forget a finished request."""
        chain = self._chains[request_id]
        chain.holders -= 1
        if not chain.holders:
            del self._chains[request_id]


# The lines of a trace file: one JSON object per moment, which a replay compares with its own.

MAGIC = "headrace_trace"
VERSION = 2

RECORDED = (
    "id",
    "arrived",
    "tenant",
    "service_class",
    "priority",
    "deadline",
    "slo",
    "retention",
    "adapter",
)
"""Fields of a request that scheduling uses and that are written unchanged."""

RECORDED_PARAMS = ("max_tokens", "min_tokens", "ignore_eos", "prompt_logprobs")
"""Sampling parameters that scheduling uses."""

WITHHELD = (
    "tokens",
    "answered",
    "prediction",
    "cached_answer",
    "indexed",
    "params",
    "salt",
    "seed",
    "affinity",
    "peer",
    "follows",
    "eos_token_ids",
    "call_format",
    "settings",
    "model",
    "images",
)
"""Fields of a request that are written as fingerprints, in part, or not at all."""


class Scribe:
    """Turns the moments of one recording into lines; ``key`` is the secret of its fingerprints."""

    def __init__(self, key: bytes) -> None:
        self._fingerprints = Fingerprints(key)

    def line(self, moment: Moment) -> dict[str, Any]:
        """The line of a moment, as plain values for JSON."""
        match moment:
            case Begun(version, settings):
                return {MAGIC: VERSION, "version": version, "settings": plain(settings)}
            case Submitted(request, now):
                return {"submit": self._request(request), "now": now}
            case Cancelled(request_id, why, now):
                return {"cancel": request_id, "why": why, "now": now}
            case Turned(knobs):
                return {"knobs": asdict(knobs)}
            case Adopted(blocks):
                return {"adopted": blocks}
            case Reset(lower):
                return {"reset": "all" if lower else "device"}
            case Spent(seconds):
                return {"spent": seconds}
            case Background(change):
                return {"background": change}
            case Took(now, seconds, outcome, events, drafts):
                line: dict[str, Any] = {"step": now, "seconds": round(seconds, 7)}
                if outcome is not None:
                    line["out"] = _outcome(outcome)
                if drafts is not None:
                    line["drafts"] = self._drafts(drafts)
                return line | {"events": self._events(events)}
            case Drained(events):
                return {"events": self._events(events)}
            case Raised(now, error):
                return {"raised": error, "now": now}

    def _request(self, request: Request) -> dict[str, Any]:
        fields = {name: plain(getattr(request, name)) for name in RECORDED}
        params = {name: getattr(request.params, name) for name in RECORDED_PARAMS}
        if request.params.stop or request.params.stop_token_ids:
            params["ignore_eos"] = False  # any stop token is written as the end token
        tokens, answered = self._fingerprints.begin(request)
        group = self._fingerprints.group(request.affinity)
        return fields | params | {"tokens": written(tokens), "answered": written(answered), "affinity": group}

    def _drafts(self, drafts: Drafts) -> dict[str, Any]:
        proposals = {}
        for request_id, (tokens, confidences, source, cut) in drafts.proposals.items():
            end = self._fingerprints.first_end(request_id, tokens)
            proposals[request_id] = [len(tokens), end, confidences, source, cut]
        line: dict[str, Any] = {"proposals": plain(proposals)}
        if drafts.seconds:
            line["seconds"] = drafts.seconds
        return line | ({"failed": drafts.failed} if drafts.failed else {})

    def _events(self, events: tuple[Event, ...]) -> list[list[Any]]:
        lines = []
        for event in events:
            lines.append(event_line(event, self._fingerprints.answer))
            if isinstance(event, Finished):
                self._fingerprints.end(event.request_id)
        return lines


def event_line(event: Event, shown: Callable[[str, tuple[int, ...]], tuple[int, ...]]) -> list[Any]:
    """An event as its name and the fields that differ from their defaults; ``shown`` hashes tokens."""
    if isinstance(event, Emitted):  # the most frequent event, so it is written directly
        return [
            "Emitted",
            {"request_id": event.request_id, "tokens": written(shown(event.request_id, event.tokens))},
        ]
    fields: dict[str, Any] = {}
    for name, value in event._asdict().items():
        if name == "stop_token":
            if value is not None:
                fields[name] = STOP
        elif name == "logprobs":
            fields[name] = len(value)
        elif name == "work":
            continue  # a replay plans the same rows
        elif name not in event._field_defaults or value != event._field_defaults[name]:
            fields[name] = plain(value)
    return [type(event).__name__, fields]


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {name: plain(value) for name, value in outcome._asdict().items() if value}


def plain(value: Any) -> Any:
    """A value for JSON: tuples become lists, infinite numbers text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# Writes a trace to a file on a separate thread; the engine only puts moments into a queue.

MOST_WAITING = 100_000
"""Maximum number of queued moments. Beyond it, the recording stops, so that it does not fill memory."""


class TraceWriter:
    """Writes moments to ``path`` (compressed if it ends in ``.gz``) until `close`, or until it has ``limit_bytes``.

    A replay needs everything since the start of the engine, so old entries are never dropped. At the limit the trace
    ends, with a last line in the file and a warning in the log, and serving continues.

    An existing file is overwritten when the first moment arrives, so a failed start keeps the last recording.

    Raises:
        BlockingIOError: another process writes to the file.
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, limit_bytes: int) -> None:
        self._path = path
        self._limit = limit_bytes
        self._raw = open(path, "ab", opener=private_opener)  # noqa: SIM115 (closed at the end)
        try:
            fcntl.flock(self._raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._raw.close()
            raise
        except OSError:
            pass  # the file system has no locks
        self._file: IO[bytes] | gzip.GzipFile = self._raw
        self._scribe = Scribe(secrets.token_bytes(32))
        self._queue: queue.SimpleQueue[Moment | None] = queue.SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="headrace-tape", daemon=True)
        self._thread.start()

    def tell(self, moment: Moment) -> None:
        """Queue a moment."""
        if not self._stopped:
            self._queue.put(moment)

    def close(self, timeout: float = 10.0) -> None:
        """Write what is queued, and close the file."""
        self._queue.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            moment = self._queue.get()
            if moment is not None:
                self._raw.seek(0)
                self._raw.truncate()
                if self._path.suffix == ".gz":
                    self._file = gzip.GzipFile(fileobj=self._raw, mode="wb")
            while moment is not None:
                self._write(self._scribe.line(moment))
                if self._queue.empty():
                    self._file.flush()
                if self._raw.tell() >= self._limit:
                    self._stop(f"the trace has reached {self._limit} bytes")
                    break
                if self._queue.qsize() > MOST_WAITING:
                    self._stop(f"more than {MOST_WAITING} moments waited to be written")
                    break
                moment = self._queue.get()
            self._file.close()
            self._raw.close()
        except Exception as error:  # a full disk, most likely; it must not affect the engine
            self._stopped = True
            logger.warning("recording to %s stopped: %s", self._path, error)
        finally:
            self._queue = queue.SimpleQueue()  # release what is still queued

    def _stop(self, why: str) -> None:
        self._stopped = True
        self._write({"stopped": why})
        logger.warning("recording to %s stopped: %s; serving continues", self._path, why)

    def _write(self, line: dict[str, object]) -> None:
        # ASCII: if the process is killed, the last line may be incomplete, but never a character.
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
