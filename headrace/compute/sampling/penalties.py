"""Penalties on what was already said, and the token counts they need.

Counts are kept only for slots whose requests use a penalty: a lane of the table each, filled when the
sequence takes the slot and increased by each token drawn, on the device, so that a step whose tokens the host
has not seen yet can already be penalized.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.compute.transfer import upload

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class TokenCounts:
    """How often each token occurs: in the output (int32 [lanes, V]) and whether in the prompt (bool)."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._output = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        self._prompt = torch.zeros(0, vocab_size, dtype=torch.bool, device=device)
        self._lane: dict[int, int] = {}
        self._free: list[int] = []

    def admit(self, slot: int, tokens: Ints, prompt_tokens: int) -> None:
        """Start a slot's counts from all tokens known, of which ``prompt_tokens`` are the prompt."""
        if slot not in self._lane:
            if not self._free:
                self._grow()
            self._lane[slot] = self._free.pop()
        lane = self._lane[slot]
        prompt, output = upload(self._device, tokens[:prompt_tokens], tokens[prompt_tokens:])
        self._prompt[lane] = False
        self._prompt[lane, prompt] = True
        self._output[lane] = 0
        self._output[lane].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def release(self, slot: int) -> None:
        """The slot's new sequence needs no counts."""
        if slot in self._lane:
            self._free.append(self._lane.pop(slot))

    def append(self, slots: Ints, tokens: torch.Tensor) -> None:
        """Count one drawn token (int64 [S], on the device) per slot; no slot occurs twice."""
        self._output[self._lanes(slots), tokens] += 1

    def penalize(
        self,
        logits: torch.Tensor,
        slots: Ints,
        repetition: torch.Tensor,
        presence: torch.Tensor,
        frequency: torch.Tensor,
    ) -> None:
        """Apply the penalties (float [S] each) to ``logits`` float32 [S, V], in place.

        Repetition (CTRL, arXiv:1909.05858) divides the positive and multiplies the negative logits of tokens
        in prompt or output; frequency and presence (OpenAI) subtract per occurrence and once, output only.
        """
        lanes = self._lanes(slots)
        counts = self._output.index_select(0, lanes)
        seen = counts > 0
        factor = repetition.unsqueeze(1).to(logits.dtype)
        repeated = torch.where(logits > 0, logits / factor, logits * factor)
        torch.where(self._prompt.index_select(0, lanes) | seen, repeated, logits, out=logits)
        logits -= counts * frequency.unsqueeze(1).to(logits.dtype)
        logits -= seen * presence.unsqueeze(1).to(logits.dtype)

    def _lanes(self, slots: Ints) -> torch.Tensor:
        (lanes,) = upload(
            self._device, np.array([self._lane[slot] for slot in slots.tolist()], dtype=np.int64)
        )
        return lanes

    def _grow(self) -> None:
        lanes = len(self._output)
        added = max(4, lanes)
        self._output = torch.cat([self._output, self._output.new_zeros(added, self._vocab_size)])
        self._prompt = torch.cat([self._prompt, self._prompt.new_zeros(added, self._vocab_size)])
        self._free.extend(range(lanes + added - 1, lanes - 1, -1))
