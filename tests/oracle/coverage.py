"""Judges model types: whether the engine computes one as transformers does, or refuses it with a reason.

It loads a tiny checkpoint as a server does (``--model-impl auto``), and compares the logits of a row computed as a
whole and in chunks, and the greedy texts of three rows in one batch, with plain transformers. Its rows, sizes and
tolerance are not those of the check at start.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.compute.checkpoint import ModelError
from headrace.compute.device import DtypeChoice
from headrace.compute.kernels import select
from headrace.config import ModelOptions
from headrace.wiring.loading.computing import Choices, find_model
from tests.oracle.harness import DEVICE, Rig, Sequence
from tests.oracle.tiny import DEFAULT, Tiny, build

LENGTH, PROMPTS, DRAWN = 48, ((0, 27), (1, 9), (2, 18)), 10
CHUNKS = ([LENGTH], [11, 1, 2, 1, 5])
TOLERANCE = 1e-3
"""Largest difference of logits in float32, whose spread is about 1."""


@dataclass(frozen=True)
class Verdict:
    """What became of a type: ``equal``, ``wrong``, ``refused``, or ``not built`` as a tiny model.

    ``by`` names the implementation, ``why`` the reason of a refusal.
    """

    kind: str
    use: str
    verdict: str
    architecture: str = ""
    by: str = ""
    why: str = ""

    def asdict(self) -> dict[str, str]:
        """The fields that are not empty."""
        return {name: value for name, value in asdict(self).items() if value}


def judge(kind: str, use: str, tiny: Tiny = DEFAULT) -> Verdict:
    """Load a tiny model of a type, and compare it with transformers."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = build(kind, use, tiny)
            model.save_pretrained(folder)
        except Exception as error:  # whatever a config of wrong sizes raises
            return Verdict(kind, use, "not built", why=f"{type(error).__name__}: {error}"[:200])
        name = type(model).__name__
        try:
            options = ModelOptions(model=folder)
            found = find_model(options, Path(folder))
            choices = Choices(
                LENGTH + DRAWN, DEVICE, DtypeChoice(torch.float32, ""), torch.float32, select("cpp", DEVICE)
            )
            decoder = found.open(options, choices, with_fingerprint=False).decoder
        except ModelError as error:
            return Verdict(kind, use, "refused", name, why=str(error).replace(folder, "FOLDER"))
        by = "native" if type(found).__name__ == "NativeModel" else "transformers"
        problem = _difference(decoder, model)
    return Verdict(kind, use, "wrong" if problem else "equal", name, by, problem)


@torch.inference_mode()
def _difference(decoder: Any, model: Any) -> str:
    """How a decoder differs from a model; empty: it does not."""
    generator = torch.Generator().manual_seed(11)
    rows = torch.randint(3, 240, (3, LENGTH), generator=generator)
    theirs = model(input_ids=rows[:1], use_cache=False).logits[0].float()
    for chunks in CHUNKS:
        ours = Rig.over(decoder).logits(Sequence(rows[0].tolist()), chunks)
        worst = float((ours - theirs).abs().max())
        if not worst < TOLERANCE:
            return f"logits differ by {worst:.2g} in chunks of {chunks}"
    prompts = [rows[row, :length].tolist() for row, length in PROMPTS]
    texts = Rig.over(decoder).generate(prompts, DRAWN)
    for prompt, text in zip(prompts, texts, strict=True):
        known = list(prompt)
        for drawn in text:
            logits = model(input_ids=torch.tensor([known]), use_cache=False).logits[0, -1]
            if logits.max() - logits[drawn] > TOLERANCE:
                return f"a text of a batch of three rows differs after {len(known) - len(prompt)} tokens"
            known.append(drawn)
    return ""
