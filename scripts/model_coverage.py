"""Judges every causal and image-text model type of the installed transformers, and records the verdicts.

    python scripts/model_coverage.py                          all types, written to docs/data/models.json
    python scripts/model_coverage.py --only mixtral qwen3_vl   some types, printed only
    python scripts/model_coverage.py --seed 3 --layers 6 --window 7 --check

`scripts/reference.py` creates the table of models from the record. The exit status is 1 if a type is wrong, or with
``--check`` if a type that the record calls equal is not.
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
from tests.oracle.tiny import TYPES, Tiny  # noqa: E402

RECORD = ROOT / "docs" / "data" / "models.json"
SECONDS = 60
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
    verdicts = []
    for use, kinds in TYPES.items():
        for kind in kinds:
            if not given.only or kind in given.only:
                verdicts.append(found := judged(kind, use, tiny))
                print(use, kind, found.verdict, found.by, found.why[:160].replace("\n", " "), flush=True)
    print(dict(Counter((each.use, each.verdict) for each in verdicts)))
    if not given.only and not given.check:
        record = {"transformers": transformers.__version__, "types": [each.asdict() for each in verdicts]}
        lines = ",\n".join(json.dumps(each) for each in record.pop("types"))
        head = json.dumps(record)[:-1]
        RECORD.write_text(f'{head}, "types": [\n{lines}\n]}}\n')
    equal = set()
    if given.check:
        known = json.loads(RECORD.read_text())["types"]
        equal = {(each["kind"], each["use"]) for each in known if each["verdict"] == "equal"}
    lost = [each for each in verdicts if (each.kind, each.use) in equal and each.verdict != "equal"]
    return int(any(each.verdict == "wrong" for each in verdicts) or bool(lost))


if __name__ == "__main__":
    sys.exit(main())
