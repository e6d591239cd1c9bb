"""What calibrating found out, as a value with a JSON form: a score, and what thresholds on it did to labelled rows.

`headrace cache calibrate` writes it, the server reads it and asks it for the threshold that keeps a promise: nothing
is served from the semantic cache without one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headrace.core.cache.certify import Certificate, Tally, certify, promising_starts, served_to_prove
from headrace.core.cache.score import Score

_FORMAT = "headrace semantic calibration 1"


class Unsupported(ValueError):
    """The data cannot support the promise that was asked for; the message says what they show."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A judge's score, valid for vectors of ``encoder``.

    ``fitted`` and ``held`` count what thresholds (the same in both, strict to loose) did to the rows that the score
    was fitted on and to those that it was not; ``fitted_rows`` and ``held_rows`` are all rows of each kind.
    """

    encoder: str
    score: Score
    fitted: tuple[Tally, ...]
    held: tuple[Tally, ...]
    fitted_rows: int
    held_rows: int

    def certificate(self, max_error: float, confidence: float) -> Certificate:
        """The loosest threshold with at most ``max_error`` wrong among served answers.

        Raises:
            Unsupported: there is none that the rows can prove.
        """
        if self.held_rows and self.fitted_rows and self.held:
            starts = promising_starts(self.fitted, max_error, confidence, self.held_rows / self.fitted_rows)
            found = certify(self.held, starts, max_error, confidence)
            if found is not None:
                return found
            tried = self.held[starts[-1]]
            shown = f"at the most promising threshold {tried.wrong} of {tried.served} were wrong"
        else:
            shown = "there are none"
        raise Unsupported(
            f"the labelled rows cannot prove that at most {max_error:.3g} of the served answers are wrong, with "
            f"{confidence:.3g} confidence: {shown}; {served_to_prove(max_error, confidence)} served without an error "
            "are the least that would do"
        )

    def to_text(self) -> str:
        """JSON that `from_text` reads."""
        content = {
            "format": _FORMAT,
            "encoder": self.encoder,
            "fitted_rows": self.fitted_rows,
            "held_rows": self.held_rows,
            "fitted": self.fitted,
            "held": self.held,
            "score": self.score.to_json(),
        }
        return json.dumps(content, indent=1) + "\n"

    @staticmethod
    def from_text(text: str) -> Calibration:
        """What `to_text` wrote.

        Raises:
            ValueError: the text is no such JSON, or its numbers cannot be.
        """
        content: Any = json.loads(text)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise ValueError(f"not a calibration: 'format' is not '{_FORMAT}'")
        try:
            fitted, held = (
                tuple(
                    Tally(float(threshold), int(served), int(wrong))
                    for threshold, served, wrong in content[part]
                )
                for part in ("fitted", "held")
            )
            found = Calibration(
                encoder=str(content["encoder"]),
                score=Score.from_json(content["score"]),
                fitted=fitted,
                held=held,
                fitted_rows=int(content["fitted_rows"]),
                held_rows=int(content["held_rows"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a calibration: {error!r}") from error
        for tallies, rows in ((fitted, found.fitted_rows), (held, found.held_rows)):
            if not all(0 <= wrong <= served <= rows for _, served, wrong in tallies):
                raise ValueError("not a calibration: more was wrong than served, or more served than asked")
        thresholds = [tally.threshold for tally in held]
        if thresholds != [tally.threshold for tally in fitted] or thresholds != sorted(
            thresholds, reverse=True
        ):
            raise ValueError("not a calibration: its thresholds do not go from strict to loose")
        return found
