"""The result of calibrating the semantic cache, as a value with a JSON form: scores, and error counts by threshold.

`headrace cache calibrate` writes it. The server reads it and computes the thresholds that meet the error bound;
without one the semantic cache serves nothing. A small cache makes errors that a large one does not, because the right
neighbour is often missing. So each size of a partition has its own score and its own proof.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from headrace.response_cache.rules.semantic.bounds import (
    Certificate,
    Tally,
    certified_threshold,
    is_promising,
    promising_starts,
    served_to_prove,
)
from headrace.response_cache.rules.semantic.judge import Rule
from headrace.response_cache.rules.semantic.score import Score

_FORMAT = "headrace semantic calibration 2"
_JUDGED_FORMAT = "headrace semantic calibration 3"
"""With a second judge: a server that does not know it must not read such a calibration."""

_OTHERS_DOUBT = 0.2
"""Share of the allowed error probability (1 - confidence) that each size but the last may use; the last, where most
is served, gets the rest.

Only sizes that could pass get a share, judged by the rows that scores were fitted on: the shares of the others would
be wasted."""


class Unsupported(ValueError):
    """The data cannot prove the requested error bound; the message says what they show."""


@dataclass(frozen=True, slots=True)
class Stratum:
    """The result for partitions of ``entries`` entries or more, up to the next stratum's.

    ``fitted`` and ``held`` count the outcomes of thresholds (the same in both, strict to loose) on the rows used to
    fit the score and on held-out rows. ``fitted_rows`` and ``held_rows`` are the numbers of rows of each kind. With a
    second judge, only pairs count as served that it scored ``judge_threshold`` or more.
    """

    entries: int
    score: Score
    fitted: tuple[Tally, ...]
    held: tuple[Tally, ...]
    fitted_rows: int
    held_rows: int
    judge_threshold: float | None = None

    def is_promising(self, max_error: float, confidence: float) -> bool:
        """Whether the rows used for fitting suggest that a certificate will be found."""
        growth = self.held_rows / max(1, self.fitted_rows)
        return is_promising(self.fitted, max_error, confidence, growth)

    def certificate(self, max_error: float, confidence: float) -> Certificate:
        """The loosest threshold with at most ``max_error`` wrong among served responses.

        Raises:
            Unsupported: the rows prove none.
        """
        starts = self._starts(max_error)
        found = certified_threshold(self.held, starts, max_error, confidence) if starts else None
        if found is None:
            raise self.refusal(max_error, confidence)
        return found

    def refusal(self, max_error: float, confidence: float) -> Unsupported:
        """The error that there is no certificate, with what the rows show."""
        starts = self._starts(max_error)
        shown = "no rows are usable"
        if starts:
            tried = self.held[starts[-1]]
            shown = f"at the most promising threshold {tried.wrong} of {tried.served} were wrong"
        return Unsupported(
            f"the labelled rows cannot prove that at most {max_error:.3g} of the served responses are wrong "
            f"with {confidence:.3g} confidence: {shown}; at least {served_to_prove(max_error, confidence)} served "
            "without an error are needed"
        )

    def _starts(self, max_error: float) -> list[int]:
        if not (self.held_rows and self.fitted_rows and self.held):
            return []
        return promising_starts(self.fitted, max_error, self.held_rows / self.fitted_rows)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Scores by size of the partition, smallest first, valid for vectors of ``encoder`` and scores of ``judge``.

    ``judge`` names the second judge; empty if there is none.
    """

    encoder: str
    strata: tuple[Stratum, ...]
    judge: str = ""

    def certificates(self, max_error: float, confidence: float) -> list[Certificate | Unsupported]:
        """The certificate of each stratum, or why there is none; all of them together hold with ``confidence``."""
        found: list[Certificate | Unsupported] = []
        all_strata = range(len(self.strata))
        promising = [index for index in all_strata if self.strata[index].is_promising(max_error, confidence)]
        sharing = promising or all_strata
        for index, stratum in enumerate(self.strata):
            if index not in sharing:
                found.append(stratum.refusal(max_error, confidence))
                continue
            last = index == sharing[-1]
            share = 1.0 - _OTHERS_DOUBT * (len(sharing) - 1) if last else _OTHERS_DOUBT
            try:
                found.append(stratum.certificate(max_error, 1.0 - share * (1.0 - confidence)))
            except Unsupported as error:
                found.append(error)
        return found

    def rules(self, max_error: float, confidence: float) -> list[Rule]:
        """The rule of each stratum: serve from its certified threshold on, or never.

        Raises:
            Unsupported: no stratum's rows prove the error bound.
        """
        found = self.certificates(max_error, confidence)
        reasons = [each for each in found if isinstance(each, Unsupported)]
        if len(reasons) == len(found):
            raise reasons[-1]
        return [
            Rule(
                stratum.entries,
                stratum.score,
                math.inf if isinstance(each, Unsupported) else each.tally.threshold,
                stratum.judge_threshold,
            )
            for stratum, each in zip(self.strata, found, strict=True)
        ]

    def to_text(self) -> str:
        """JSON that `from_text` reads."""
        strata = [
            {
                "entries": stratum.entries,
                "fitted_rows": stratum.fitted_rows,
                "held_rows": stratum.held_rows,
                "fitted": stratum.fitted,
                "held": stratum.held,
                "score": stratum.score.to_json(),
            }
            | ({"judge_threshold": stratum.judge_threshold} if self.judge else {})
            for stratum in self.strata
        ]
        content = {"format": _JUDGED_FORMAT if self.judge else _FORMAT, "encoder": self.encoder}
        content |= {"judge": self.judge} if self.judge else {}
        return json.dumps(content | {"strata": strata}, indent=1) + "\n"

    @staticmethod
    def from_text(text: str) -> Calibration:
        """Read what `to_text` wrote.

        Raises:
            ValueError: the text is not such JSON, or its numbers are inconsistent.
        """
        content: Any = json.loads(text)
        if not isinstance(content, dict) or content.get("format") not in (_FORMAT, _JUDGED_FORMAT):
            raise ValueError(f"not a calibration: 'format' is neither '{_FORMAT}' nor '{_JUDGED_FORMAT}'")
        judged = content["format"] == _JUDGED_FORMAT
        try:
            strata = tuple(_read_stratum(each, judged) for each in content["strata"])
            encoder, judge = str(content["encoder"]), str(content["judge"]) if judged else ""
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a calibration: {error!r}") from error
        sizes = [stratum.entries for stratum in strata]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError("not a calibration: its partition sizes are not ascending")
        if judged and not judge:
            raise ValueError("not a calibration: its judge has no name")
        return Calibration(encoder, strata, judge)


def _read_stratum(content: Any, judged: bool) -> Stratum:
    fitted, held = (
        tuple(Tally(float(threshold), int(served), int(wrong)) for threshold, served, wrong in content[part])
        for part in ("fitted", "held")
    )
    found = Stratum(
        entries=int(content["entries"]),
        score=Score.from_json(content["score"]),
        fitted=fitted,
        held=held,
        fitted_rows=int(content["fitted_rows"]),
        held_rows=int(content["held_rows"]),
        judge_threshold=float(content["judge_threshold"]) if judged else None,
    )
    if judged and not math.isfinite(found.judge_threshold or 0.0):
        raise ValueError("not a calibration: a threshold of its judge is not finite")
    for tallies, rows in ((fitted, found.fitted_rows), (held, found.held_rows)):
        if not all(0 <= wrong <= served <= rows for _, served, wrong in tallies):
            raise ValueError("not a calibration: more rows are wrong than served, or served than counted")
    thresholds = [tally.threshold for tally in held]
    if thresholds != [tally.threshold for tally in fitted] or thresholds != sorted(thresholds, reverse=True):
        raise ValueError("not a calibration: its thresholds are not ordered from strict to loose")
    return found
