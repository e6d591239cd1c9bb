"""A process that renders the chat templates that it reads, one line of JSON each, within limits of time and memory.

Signals of timers end it in the middle of whatever it does, since nothing handles them. `processes` starts it, reads why
it ended, and starts another.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any

from headrace.text.content import Controls
from headrace.text.processes import Limits, Stop
from headrace.text.rendering import Job, TemplateError, render_job, variables_of

LOWER_PRIORITY = 10
PAYLOAD_TIMES = 32
"""Memory for the messages, in bytes per byte of their JSON."""
KEPT_BYTES = 64 << 20
"""Maximum growth of a process by the templates that it has rendered; beyond it, the process ends."""
OUTPUT_TIMES = 4
"""Maximum output for the messages, in bytes per byte of their JSON."""


def main() -> None:
    """Render until standard input ends, within the limits of the first argument."""
    limits = Limits(*json.loads(sys.argv[1]))
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # of a terminal; the server ends by it, and this process after it
    os.nice(LOWER_PRIORITY)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, 0)
    gc.freeze()
    own = _own_bytes()
    for line in sys.stdin.buffer:
        _limit(resource.RLIMIT_AS, own + limits.memory_bytes + PAYLOAD_TIMES * len(line))
        answer, text = _answer(line, limits)
        written = text.encode()
        answer |= {"full": _own_bytes() > own + KEPT_BYTES}
        sys.stdout.buffer.write(json.dumps(answer | {"bytes": len(written)}).encode() + b"\n" + written)
        sys.stdout.buffer.flush()


def _answer(line: bytes, limits: Limits) -> tuple[dict[str, Any], str]:
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    try:
        question = json.loads(line)
        if "variables_of" in question:
            return {"variables": variables_of(question["variables_of"])}, ""
        rendered = render_job(_job(question["job"]))
        if len(rendered.text.encode()) > limits.output_bytes + OUTPUT_TIMES * len(line):
            return {"stopped": Stop.OUTPUT.name}, ""
        return {"quoted": rendered.quoted}, rendered.text
    except TemplateError as error:
        return {"error": str(error)}, ""
    except MemoryError:
        return {"stopped": Stop.MEMORY.name}, ""
    finally:
        # What a template left in cycles must not count for the next one, which may be another tenant's.
        gc.collect()
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _job(fields: dict[str, Any]) -> Job:
    spellings, answered = fields["controls"]["spellings"], fields["controls"]["answered"]
    return Job(**fields)._replace(controls=Controls(tuple(spellings), tuple(answered)))


def _limit(kind: int, most: int) -> None:
    """Set the soft limit; systems that cannot hold it leave the others."""
    with suppress(OSError, ValueError):
        resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def _own_bytes() -> int:
    """The address space that this process has now."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 1 << 30


if __name__ == "__main__":
    main()
