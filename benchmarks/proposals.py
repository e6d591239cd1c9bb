"""The index of past outputs: its cost and its tokens per step: ``python -m benchmarks.proposals --data FOLDER``.

Each file of ``FOLDER`` (``*.jsonl``) is a sequence of texts. Every text is "generated" once, in order. At each step the
index proposes up to eight tokens; the correct ones and one more token are accepted. At its end the text is indexed.
Tokens per step is the upper bound of what a verifier gains. The second pass generates each text a second time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from headrace.core.drafting.suffix import BYTES_PER_TOKEN, ContinuationIndex
from headrace.text.tokenizer import Tokenizer

MOST = 8
TEXTS = 300
ROOM = 64 << 20
TOKENIZER = Path(__file__).parents[1] / "headrace" / "builtin" / "target"


def replay(index: ContinuationIndex, texts: list[list[int]], seconds: list[float]) -> float:
    """Tokens per step over all texts; the seconds of each proposal are added to ``seconds``."""
    steps = tokens = 0
    for text in texts:
        at = 4
        while at < len(text):
            context = text[max(0, at - 64) : at]
            begin = time.perf_counter()
            proposal = index.propose(context, MOST)
            seconds.append(time.perf_counter() - begin)
            right = 0
            for proposed, actual in zip(proposal.tokens, text[at:], strict=False):
                if proposed != actual:
                    break
                right += 1
            at += right + 1
            tokens += right + 1
            steps += 1
        index.add(text, max_bytes=ROOM)
    return tokens / steps


def main() -> None:
    """Print one row per file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of .jsonl files")
    folder = parser.parse_args().data
    tokenizer = Tokenizer.from_folder(TOKENIZER)
    print(
        f"{'stream':16} {'tokens':>8} {'us/token in':>12} {'p50 us':>7} {'p99 us':>7} {'tokens/step':>12} {'again':>6}"
    )
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text().splitlines()[:TEXTS]
        texts = [list(tokens) for tokens in tokenizer.encode_batch(lines, False)]
        tokens = sum(map(len, texts))
        rounds = []
        for _ in range(3):
            fresh = ContinuationIndex()
            begin = time.perf_counter()
            for text in texts:
                fresh.add(text, max_bytes=ROOM)
            rounds.append((time.perf_counter() - begin) / tokens)
        index, seconds = ContinuationIndex(), list[float]()
        first = replay(index, texts, seconds)
        again = replay(index, texts, seconds)
        p50, p99 = (statistics.quantiles(seconds, n=100)[at] for at in (49, 98))
        print(
            f"{path.stem:16} {tokens:8} {statistics.median(rounds) * 1e6:12.2f} {p50 * 1e6:7.1f} {p99 * 1e6:7.1f} "
            f"{first:12.2f} {again:6.2f}"
        )
    print(f"{BYTES_PER_TOKEN} bytes per token of room")


if __name__ == "__main__":
    main()
