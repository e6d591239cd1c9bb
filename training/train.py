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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training.corpus import documents
from training.induction import lay_induction
from training.model import DRAFT, TARGET, Decoder, Shape, parameter_count, save_model
from training.tokenizer import MAX_LENGTH, encode_batch, save_tokenizer

SHARD = 2048  # documents that are sorted by length together
CORES = 2  # of the machine for which the recipes are made; the result does not depend on it
LENGTH_POWER = 0.4  # a token of an answer of n tokens weighs n ** -LENGTH_POWER


@dataclass(frozen=True)
class Recipe:
    """How long and how fast to learn. Steps, not seconds, define the result."""

    shape: Shape
    steps: int
    copy_steps: int  # the first steps, which only copy
    long_steps: int  # the last steps, with some contexts of several thousand tokens
    lesson: str = "all"  # of the steps between; see `batches`
    batch_tokens: int = 1024
    micro_batches: int = 4
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 30
    shard: int = SHARD
    decay: float = 0.45  # the share of the steps in which the learning rate falls to zero


RECIPES = {  # stages; a later one goes on from the weights that the one before it has written
    "target": [
        Recipe(TARGET, steps=3000, copy_steps=60, long_steps=80),
        Recipe(TARGET, steps=1800, copy_steps=0, long_steps=120, muon_lr=0.015, adam_lr=2e-3, decay=0.9),
        Recipe(
            TARGET,
            steps=600,
            copy_steps=0,
            long_steps=0,
            lesson="chapters",
            muon_lr=0.01,
            adam_lr=1.5e-3,
            decay=0.9,
        ),
    ],
    "draft": [Recipe(DRAFT, steps=300, copy_steps=10, long_steps=6, adam_lr=4e-3, decay=0.6)],
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
        if starts and r.random() < 0.1:  # a gap in the positions stands for a long text between two messages
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


def batches(
    tokenizer: Tokenizer, seed: int, budget: int, lesson: str = "all", shard: int = SHARD
) -> Iterator[Batch]:
    """Yield batches of about ``budget`` tokens: all kinds of documents, and a share of those of the ``lesson``."""
    r = random.Random(seed)
    usual, special = documents(seed), documents(seed + 1, lesson)
    share = {"all": 0.0, "long": 0.05, "chapters": 0.12, "copying": 1.0}[lesson]
    while True:
        n_special = int(shard * share)
        drawn = [*islice(usual, shard - n_special), *islice(special, n_special)]
        items = encode_batch(tokenizer, drawn)
        limit = MAX_LENGTH if lesson == "long" else 2048
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


class HeadLoss(torch.autograd.Function):
    """Weighted cross-entropy of the tied head, in one buffer: most of a small model's time would go into others.

    Takes hidden states [rows, hidden], the embedding [vocab, hidden], labels [rows] and weights [rows].
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, embedding: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Return the loss; its gradients are made at once and kept for ``backward``."""
        hidden, embedding = hidden.bfloat16(), embedding.bfloat16()
        scores = (hidden @ embedding.T).float()
        scores.sub_(scores.amax(-1, keepdim=True))
        right = scores.gather(1, labels[:, None]).squeeze(1)
        total = scores.exp_().sum(-1)
        loss = ((total.log() - right) * weights).sum()
        scores.mul_((weights / total)[:, None]).scatter_add_(1, labels[:, None], -weights[:, None])
        slope = scores.bfloat16()
        ctx.save_for_backward(slope @ embedding, slope.T @ hidden)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of hidden states and embedding, for an outer gradient of one."""
        by_hidden, by_embedding = ctx.saved_tensors
        return by_hidden, by_embedding.float(), None, None


class Muon:
    """Momentum whose matrices are orthogonalised by Newton-Schulz steps before they are applied."""

    def __init__(self, params: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.01) -> None:
        self.momentum, self.decay = momentum, decay
        self.buffers = {p: torch.zeros_like(p) for p in params}

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
    def step(self, p: nn.Parameter, grad: Tensor, lr: float) -> None:
        """Apply the gradient of one matrix."""
        self.buffers[p].lerp_(grad, 1 - self.momentum)
        update = self._orthogonal(grad.lerp(self.buffers[p], self.momentum))
        p.mul_(1 - lr * self.decay)
        p.add_(update, alpha=-lr * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


def _rate(step: int, recipe: Recipe) -> float:
    falling = max(1.0, recipe.steps * recipe.decay)
    return min(1.0, (step + 1) / recipe.warmup, max(0.0, (recipe.steps - step) / falling))


def train_stages(which: str, tokenizer: Tokenizer, folder: Path, seed: int, resume: bool = False) -> None:
    """Train one of the models through all stages; ``resume`` goes on with the stage that was interrupted."""
    recipes = RECIPES[which]
    begun = [stage for stage in range(len(recipes)) if resume and _state_file(folder, stage).exists()]
    for stage in range(max(begun, default=0), len(recipes)):
        train(recipes[stage], tokenizer, folder, seed, stage, resume=resume)


def _state_file(folder: Path, stage: int) -> Path:
    return folder.with_suffix(f".{stage}.state.pt")


def train(
    recipe: Recipe,
    tokenizer: Tokenizer,
    folder: Path,
    seed: int,
    stage: int = 0,
    save_every: int = 50,
    resume: bool = False,
) -> Decoder:
    """Train a decoder by one recipe and write it, now and then and at the end, to ``folder``.

    The first stage lays copying into fresh weights, a later one reads the weights in ``folder``.
    An interrupted run goes on from its last state with ``resume``, as though it had never stopped. Because the
    learning rate is constant until the decay, ``recipe.steps`` may even be changed before the decay begins.
    Each micro-batch of a step is computed by a single thread, so that the result does not depend on how
    the linear algebra libraries would split their work.
    """
    torch.set_num_threads(1)
    seed += 1000 * stage
    torch.manual_seed(seed)
    model = Decoder(recipe.shape)
    if stage:
        model.load_state_dict(
            {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}, strict=False
        )
    else:
        lay_induction(model, seed)
    print(f"{folder}: {parameter_count(model):,} parameters", flush=True)
    save_tokenizer(tokenizer, folder)
    state_file = _state_file(folder, stage)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon, adam = (
        Muon(matrices),
        torch.optim.AdamW(others, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )
    feeds = {
        lesson: batches(tokenizer, seed + number, recipe.batch_tokens, lesson, recipe.shard)
        for lesson, number in (("copying", 10), ("all", 20), ("long", 30), ("chapters", 40))
    }
    params = list(model.parameters())

    def gradients(batch: Batch, total: float) -> tuple[float, tuple[Tensor, ...]]:
        torch.set_num_threads(1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model.hidden(batch.ids, batch.positions, batch.rows)
        loss: Tensor = HeadLoss.apply(
            hidden, model.model.embed_tokens.weight, batch.labels, batch.weights / total
        )
        return loss.item(), torch.autograd.grad(loss, params)

    def update(p: nn.Parameter, grads: list[Tensor], rate: float) -> None:
        torch.set_num_threads(1)
        grad = torch.stack(grads).sum(0)
        if p in muon.buffers:
            muon.step(p, grad, recipe.muon_lr * rate)
        else:
            p.grad = grad

    def draw(step: int) -> list[Batch]:
        late = step >= recipe.steps - recipe.long_steps
        lesson = "copying" if step < recipe.copy_steps else "long" if late else recipe.lesson
        return list(islice(feeds[lesson], recipe.micro_batches))

    pool, ahead = ThreadPoolExecutor(CORES), ThreadPoolExecutor(1)
    first = 0
    if resume and state_file.exists():
        state = torch.load(state_file)
        model.load_state_dict(state["model"], strict=False)
        adam.load_state_dict(state["adam"])
        muon.buffers = dict(zip(matrices, state["muon"], strict=True))
        first = state["step"]
        for step in range(first):
            draw(step)
    upcoming = ahead.submit(draw, first)
    began, seen, smooth = time.time(), 0, 0.0
    for step in range(first, recipe.steps):
        micro = upcoming.result()
        upcoming = ahead.submit(draw, step + 1)
        total = sum(float(batch.weights.sum()) for batch in micro)
        results = list(pool.map(gradients, micro, [total] * len(micro)))
        loss_sum = sum(loss for loss, _ in results)
        seen += sum(batch.ids.numel() for batch in micro)
        rate = _rate(step, recipe)
        grads = [list(of_param) for of_param in zip(*(g for _, g in results), strict=True)]
        list(pool.map(update, params, grads, [rate] * len(params)))
        nn.utils.clip_grad_norm_(others, 1.0)
        adam.param_groups[0]["lr"] = recipe.adam_lr * rate
        adam.step()
        smooth = loss_sum if step == 0 else 0.95 * smooth + 0.05 * loss_sum
        if step % 20 == 19:
            taken = time.time() - began
            print(f"step {step + 1} loss {smooth:.3f} {seen / taken:,.0f} tok/s {taken:.0f} s", flush=True)
        if step % save_every == save_every - 1:
            save_model(model, folder)
            state = {"model": model.state_dict(), "adam": adam.state_dict(), "step": step + 1}
            torch.save({**state, "muon": list(muon.buffers.values())}, state_file)
    save_model(model, folder)
    state_file.unlink(missing_ok=True)
    print(f"{folder}: {seen:,} tokens in {time.time() - began:.0f} s", flush=True)
    return model


def main() -> None:
    """Train one of the models from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=sorted(RECIPES))
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the last state of an interrupted run"
    )
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    train_stages(args.which, tokenizer, args.out, args.seed, args.resume)


if __name__ == "__main__":
    main()
