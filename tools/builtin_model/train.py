"""Training of one decoder on the synthetic corpus, on the CPU."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.builtin_model.corpus import documents
from tools.builtin_model.model import DRAFT, TARGET, Decoder, Shape, parameter_count, save_model
from tools.builtin_model.tokenizer import MAX_LENGTH, encode_batch, save_tokenizer

SHARD = 4096  # documents that are sorted by length together
LENGTH_POWER = 0.4  # a token of an answer of n tokens weighs n ** -LENGTH_POWER


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to learn. Steps, not seconds, define the result."""

    shape: Shape
    steps: int
    long_steps: int  # the last steps, with some contexts of several thousand tokens
    batch_tokens: int = 1664
    micro_batches: int = 4
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 60
    decay: float = 0.45  # the share of the steps in which the learning rate falls to zero


RECIPES = {
    "target": Recipe(TARGET, steps=1000, long_steps=60),
    "draft": Recipe(DRAFT, steps=1000, long_steps=60, adam_lr=4e-3),
}


@dataclass(frozen=True)
class Batch:
    """A padded batch of documents of similar length, with the flat positions that are learned."""

    ids: Tensor
    positions: Tensor
    rows: Tensor
    labels: Tensor
    weights: Tensor


Encoded = tuple[NDArray[np.uint16], NDArray[np.bool_], list[int]]


def _collate(items: list[Encoded], r: random.Random) -> Batch:
    width = -(-(max(len(ids) for ids, _, _ in items) - 1) // 16) * 16
    inputs = np.zeros((len(items), width), np.int64)
    labels, weights = inputs.copy(), np.zeros((len(items), width), np.float32)
    positions = np.tile(np.arange(width, dtype=np.int64), (len(items), 1))
    for row, (ids, learned, starts) in enumerate(items):
        n = len(ids) - 1
        inputs[row, :n], labels[row, :n] = ids[:-1], ids[1:]
        weights[row, :n] = learned[1:] * max(1, int(learned.sum())) ** -LENGTH_POWER
        if starts and r.random() < 0.2:  # a gap in the positions stands for a long text between two messages
            positions[row, r.choice(starts) :] += r.randint(1, MAX_LENGTH - width)
    flat = weights.reshape(-1)
    rows = np.flatnonzero(flat)
    return Batch(
        torch.from_numpy(inputs),
        torch.from_numpy(np.minimum(positions, MAX_LENGTH - 1)),
        torch.from_numpy(rows),
        torch.from_numpy(labels.reshape(-1)[rows]),
        torch.from_numpy(flat[rows]),
    )


def batches(tokenizer: Tokenizer, seed: int, budget: int, long_share: float = 0.0) -> Iterator[Batch]:
    """Yield batches of about ``budget`` tokens; ``long_share`` of the documents are long chats."""
    r = random.Random(seed)
    short, long = documents(seed), documents(seed + 1, long=True)
    while True:
        n_long = int(SHARD * long_share)
        drawn = [*islice(short, SHARD - n_long), *islice(long, n_long)]
        items = encode_batch(tokenizer, drawn)
        limit = MAX_LENGTH if long_share else 2048
        items = [(a[:limit], b[:limit], [i for i in c if i < limit]) for a, b, c in items]
        items.sort(key=lambda item: len(item[0]))
        groups: list[list[Encoded]] = [[]]
        for item in items:
            if groups[-1] and (len(groups[-1]) + 1) * len(item[0]) > budget:
                groups.append([])
            groups[-1].append(item)
        r.shuffle(groups)
        for group in groups:
            yield _collate(group, r)


class Muon:
    """Momentum whose matrices are orthogonalised by Newton-Schulz steps before they are applied."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.01) -> None:
        self.params, self.momentum, self.decay = params, momentum, decay
        self.buffers = [torch.zeros_like(p) for p in params]

    @staticmethod
    def _orthogonal(m: Tensor) -> Tensor:
        x = m.bfloat16()
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        result: Tensor = (x.T if tall else x).float()
        return result

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the gradients."""
        for p, buffer in zip(self.params, self.buffers, strict=True):
            if p.grad is None:
                continue
            buffer.lerp_(p.grad, 1 - self.momentum)
            update = self._orthogonal(p.grad.lerp(buffer, self.momentum))
            p.mul_(1 - lr * self.decay)
            p.add_(update, alpha=-lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def _rate(step: int, recipe: Recipe) -> float:
    falling = int(recipe.steps * recipe.decay)
    return min(1.0, (step + 1) / recipe.warmup, max(0.0, (recipe.steps - step) / falling))


def train(recipe: Recipe, tokenizer: Tokenizer, folder: Path, seed: int, save_every: int = 200) -> Decoder:
    """Train a decoder and write it, now and then and at the end, to ``folder``.

    Each micro-batch of a step is computed by one thread of its own, so that the result does not depend on how
    the linear algebra libraries would split their work.
    """
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = Decoder(recipe.shape)
    print(f"{folder}: {parameter_count(model):,} parameters", flush=True)
    save_tokenizer(tokenizer, folder)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)
    feed = batches(tokenizer, seed + 10, recipe.batch_tokens)
    long_feed = batches(tokenizer, seed + 20, recipe.batch_tokens, long_share=0.05)
    params = list(model.parameters())

    def gradients(batch: Batch, total: float) -> tuple[float, tuple[Tensor, ...]]:
        torch.set_num_threads(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch.ids, batch.positions, batch.rows)
        losses = F.cross_entropy(logits.float(), batch.labels, reduction="none")
        loss = (losses * batch.weights).sum() / total
        return loss.item(), torch.autograd.grad(loss, params)

    pool = ThreadPoolExecutor(recipe.micro_batches)
    start, seen, smooth = time.time(), 0, 0.0
    for step in range(recipe.steps):
        source = feed if step < recipe.steps - recipe.long_steps else long_feed
        micro = list(islice(source, recipe.micro_batches))
        total = sum(float(batch.weights.sum()) for batch in micro)
        results = list(pool.map(gradients, micro, [total] * len(micro)))
        loss_sum = sum(loss for loss, _ in results)
        seen += sum(batch.ids.numel() for batch in micro)
        for i, p in enumerate(params):
            p.grad = torch.stack([grads[i] for _, grads in results]).sum(0)
        nn.utils.clip_grad_norm_(others, 1.0)
        rate = _rate(step, recipe)
        muon.step(recipe.muon_lr * rate)
        adam.param_groups[0]["lr"] = recipe.adam_lr * rate
        adam.step()
        model.zero_grad(set_to_none=True)
        smooth = loss_sum if step == 0 else 0.95 * smooth + 0.05 * loss_sum
        if step % 20 == 19:
            taken = time.time() - start
            print(f"step {step + 1} loss {smooth:.3f} {seen / taken:,.0f} tok/s {taken:.0f} s", flush=True)
        if step % save_every == save_every - 1:
            save_model(model, folder)
    save_model(model, folder)
    print(f"{folder}: {seen:,} tokens in {time.time() - start:.0f} s", flush=True)
    return model


def main() -> None:
    """Train one of the models from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=sorted(RECIPES))
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    train(RECIPES[args.which], Tokenizer.from_file(str(args.tokenizer)), args.out, args.seed)


if __name__ == "__main__":
    main()
