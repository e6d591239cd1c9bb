"""Error messages of llguidance, as one line for a client."""

from __future__ import annotations


def first_reason(error: str) -> str:
    """The reason in an error, without the excerpt of the source."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "unknown")
    return why.removeprefix("error: ")[:300]
