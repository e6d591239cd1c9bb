"""Renders chat templates in processes of their own, which are ended at their limits of time and memory (`bounded`).

A template that a client sent, or that exceeds the `Budget` of the server's process, can hold the interpreter's lock in
one call inside C for minutes, or fill the memory. Here it can do so.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from typing import Any

from headrace.text.bounded import Answer, BoundedProcesses, Limits, Stopped, TooMuchOutput, serve
from headrace.text.content import Controls, PromptText
from headrace.text.rendering import Job, TemplateError, render_job, variables_of

DEFAULT_LIMITS = Limits()


class TemplateStopped(TemplateError):
    """A template that reached a limit."""


class RenderProcesses:
    """Processes that render templates, one at a time each. A call blocks its thread; as many run as threads call."""

    def __init__(self, limits: Limits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._processes = BoundedProcesses("headrace.text.processes")
        self.close = self._processes.close

    def render(self, job: Job) -> PromptText:
        """The prompt of ``job``.

        Raises:
            TemplateError: as in `rendering.render_job`; `TemplateStopped` if it reached a limit.
        """
        answer, text = self._ask({"job": job._asdict() | {"controls": job.controls._asdict()}})
        return PromptText(text, tuple((start, end) for start, end in answer["quoted"]))

    def variables(self, source: str) -> frozenset[str]:
        """As `rendering.variables_of`."""
        return frozenset(self._ask({"variables_of": source})[0]["variables"])

    def _ask(self, question: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
        try:
            payload = json.dumps(question).encode()
        except (TypeError, ValueError) as error:
            raise TemplateError(f"the messages cannot be written as JSON: {error}") from error
        try:
            answer, text = self._processes.ask(payload, self._limits)
        except Stopped as stopped:
            raise TemplateStopped(f"the chat template was stopped: {stopped}") from None
        if "error" in answer:
            raise TemplateError(answer["error"])
        return answer, str(text, "utf-8")


PROCESSES = RenderProcesses()
"""Those of this process; they keep nothing of a template but its compiled form."""

atexit.register(PROCESSES.close)


# -- in such a process

PAYLOAD_TIMES = 32
"""Memory for the messages, in bytes per byte of their JSON."""
OUTPUT_TIMES = 4
"""Maximum output for the messages, in bytes per byte of their JSON."""


def _answer(payload: bytes, limits: Limits, options: dict[str, Any]) -> Answer:
    try:
        question = json.loads(payload)
        if "variables_of" in question:
            return {"variables": variables_of(question["variables_of"])}, b""
        rendered = render_job(_job(question["job"]))
    except TemplateError as error:
        return {"error": str(error)}, b""
    text = rendered.text.encode()
    if len(text) > limits.output_bytes + OUTPUT_TIMES * len(payload):
        raise TooMuchOutput
    return {"quoted": rendered.quoted}, text


def _job(fields: dict[str, Any]) -> Job:
    spellings, answered = fields["controls"]["spellings"], fields["controls"]["answered"]
    return Job(**fields)._replace(controls=Controls(tuple(spellings), tuple(answered)))


if __name__ == "__main__":
    serve(_answer, PAYLOAD_TIMES)
