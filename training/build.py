"""Build the tokenizer, the target and the draft from a seed: ``python -m training.build``."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tokenizers import Tokenizer

from training.evaluate import report
from training.tokenizer import save_tokenizer, train_tokenizer
from training.train import RECIPES, train_stages

SEED = 1
BUILTIN = Path(__file__).resolve().parents[1] / "headrace" / "builtin"


def main() -> None:
    """Run all steps one after the other and print the evaluation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILTIN)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        save_tokenizer(train_tokenizer(args.seed), Path(scratch))
        tokenizer = Tokenizer.from_file(str(Path(scratch) / "tokenizer.json"))
    for name in RECIPES:
        train_stages(name, tokenizer, args.out / name, args.seed)
    print(report(args.out))


if __name__ == "__main__":
    main()
