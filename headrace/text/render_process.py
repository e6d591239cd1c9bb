"""A process that renders the chat templates that `processes` sends, within limits of time and memory."""

from __future__ import annotations

import json
from typing import Any

from headrace.text.bounded import Limits
from headrace.text.bounded_process import Answer, TooMuchOutput, serve
from headrace.text.content import Controls
from headrace.text.rendering import Job, TemplateError, render_job, variables_of

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
