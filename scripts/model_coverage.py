"""Judges every causal and image-text model type of the installed transformers, and records the verdicts.

    python scripts/model_coverage.py                          all types, recorded in docs/data/models.json
    python scripts/model_coverage.py --only mixtral qwen3_vl   some types
    python scripts/model_coverage.py --seed 3 --layers 6 --window 7 --check

Verdicts on tiny models of the default sizes are recorded; `scripts/reference.py` creates the table of models from the
record. The exit status is 1 if a type is wrong, or with ``--check`` if a type that was recorded as equal is not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.oracle.coverage import Verdict, judge  # noqa: E402
from tests.oracle.tiny import DEFAULT, TYPES, Tiny  # noqa: E402

RECORD = ROOT / "docs" / "data" / "models.json"
SECONDS = 120
"""Time limit of a type."""


class _Slow(BaseException):
    """A type took too long; not an `Exception`, which a refusal could contain."""


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise _Slow

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judged(kind: str, use: str, tiny: Tiny) -> Verdict:
    """The verdict on a type; one that takes too long is not built."""
    try:
        with _limited(), contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return judge(kind, use, tiny)
    except _Slow:
        return Verdict(kind, use, "not built", why=f"it takes more than {SECONDS} s")


def main() -> int:
    """Judge the types; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=())
    parser.add_argument("--check", action="store_true")
    for name, value in Tiny()._asdict().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tiny = Tiny(given.layers, given.window, given.seed)
    known = _recorded()
    verdicts = []
    for use, kinds in TYPES.items():
        for kind in kinds:
            if given.only and kind not in given.only:
                continue
            verdicts.append(found := judged(kind, use, tiny))
            print(use, kind, found.verdict, found.by, found.why[:160].replace("\n", " "), flush=True)
            if tiny == DEFAULT:
                _record(known | {(each.use, each.kind): each.asdict() for each in verdicts})
    print(dict(Counter((each.use, each.verdict) for each in verdicts)))
    equal = {key for key, each in known.items() if each["verdict"] == "equal"} if given.check else set()
    lost = [each for each in verdicts if (each.use, each.kind) in equal and each.verdict != "equal"]
    return int(any(each.verdict == "wrong" for each in verdicts) or bool(lost))


def _recorded() -> dict[tuple[str, str], dict[str, str]]:
    """The recorded verdicts by use and type."""
    if not RECORD.is_file():
        return {}
    return {(each["use"], each["kind"]): each for each in json.loads(RECORD.read_text())["types"]}


def _record(verdicts: dict[tuple[str, str], dict[str, str]]) -> None:
    """Write the verdicts in the order of the types, one a line."""
    order = [(use, kind) for use, kinds in TYPES.items() for kind in kinds]
    lines = ",\n".join(json.dumps(verdicts[key]) for key in order if key in verdicts)
    RECORD.write_text(f'{{"transformers": "{transformers.__version__}", "types": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
