"""A decoder without weights whose logits are a function of the whole paged prefix.

Its "keys" are the token and its position, written through `slot_mapping` and read back through the block
tables, so a wrong table, offset, position or copy changes the logits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from headrace.compute.batch import Batch, Ints
from headrace.compute.sampling.choice import TokenChoice, choose, counting_of, likeliest
from headrace.compute.sampling.penalties import Allowed, restrict
from headrace.compute.shared_keys import SharedKeys
from headrace.core.plan import Entry, Row
from headrace.core.request import SamplingParams

VOCAB = 97
BLOCK = 4


class FakeKV:
    layers = ()

    def __init__(self, num_blocks: int = 128, block_size: int = BLOCK) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.pages = torch.full((num_blocks * block_size, 2), -1, dtype=torch.int64)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self.pages,)

    def copy_blocks(self, sources: list[int], targets: list[int]) -> None:
        pages = self.pages.view(self.num_blocks, self.block_size, 2)
        for source, target in zip(sources, targets, strict=True):
            pages[target] = pages[source]


def logits_of(tokens: list[int], vocab: int = VOCAB) -> torch.Tensor:
    """Logits after a prefix: from a generator seeded with a hash of it."""
    state = 7
    for token in tokens:
        state = (state * 1_000_003 + token + 1) % (1 << 61)
    return torch.randn(vocab, generator=torch.Generator().manual_seed(state)) * 3


def greedy(prompt: tuple[int, ...], count: int, vocab: int = VOCAB) -> list[int]:
    """The likeliest tokens after a prefix."""
    known = list(prompt)
    for _ in range(count):
        known.append(int(logits_of(known, vocab).argmax()))
    return known[len(prompt) :]


class FakeDecoder:
    def __init__(self, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        self.calls: list[Batch] = []
        self.spoil: dict[int, float] = {}  # last token of a prefix -> value that fills its logits
        self.explode = False
        self.max_logit_rows = 0  # rows of them that were asked for at once

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What `hidden` gives are logits already."""
        self.max_logit_rows = max(self.max_logit_rows, len(hidden))
        return hidden.clone()

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        return likeliest(logits)

    def likeliest_after(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.likeliest(self.logits(hidden))

    def choose(self, logits: torch.Tensor, choice: TokenChoice) -> torch.Tensor:
        return choose(logits, choice)

    def restrict(self, logits: torch.Tensor, allowed: Allowed) -> torch.Tensor:
        return restrict(logits, allowed)

    def accept(self, *given: torch.Tensor) -> torch.Tensor:
        return counting_of(*given)

    def greedy(self, batch: Batch, kv: FakeKV) -> Ints | None:
        return None

    def hidden(self, batch: Batch, kv: FakeKV) -> torch.Tensor:
        if self.explode:
            raise RuntimeError("device lost")
        self.calls.append(replace(batch, lengths=tuple(batch.lengths), contexts=tuple(batch.contexts)))
        real = batch.slot_mapping >= 0
        kv.pages[batch.slot_mapping[real]] = torch.stack(
            [batch.tokens[real], batch.positions[real]], 1
        ).long()
        starts = batch.query_starts.tolist()
        out = torch.zeros(len(batch.logits_indices), self.vocab)
        for line, index in enumerate(batch.logits_indices.tolist()):
            row = next(r for r in range(len(starts) - 1) if index < starts[r + 1])
            position = int(batch.positions[index])
            if not int(batch.context_lens[row]):  # padding of a graph
                out[line] = torch.nan
                continue
            assert starts[row + 1] - 1 - index == int(batch.context_lens[row]) - 1 - position
            shared, leader = _shared(batch.shared, row, index)
            assert shared <= position + 1
            places = [
                int(batch.block_tables[row if p >= shared else leader, p // batch.block_size])
                * batch.block_size
                + p % batch.block_size
                for p in range(position + 1)
            ]
            seen = kv.pages[places]
            assert seen[:, 1].tolist() == list(range(position + 1))
            prefix = seen[:, 0].tolist()
            out[line] = logits_of(prefix, self.vocab)
            if prefix[-1] in self.spoil:
                out[line] = self.spoil[prefix[-1]]
        return out


def _shared(shared: SharedKeys | None, row: int, token: int) -> tuple[int, int]:
    """How many keys a packed token of a row reads with its group, and the row in whose table they are."""
    if shared is None:
        return 0, row
    place = shared.order.tolist().index(token)
    for begin, count, keys, leader in shared.groups.reshape(-1, 4).tolist():
        if begin <= place < begin + count:
            assert keys == int(shared.keys[row])
            return keys, leader
    raise AssertionError(f"token {token} is in no group")


def entry(slot: int, tokens: tuple[int, ...], blocks: tuple[int, ...] = (), **params: object) -> Entry:
    seed = int(params.pop("seed_", 0))  # type: ignore[call-overload]
    prompt = int(params.pop("prompt_tokens", len(tokens)))  # type: ignore[call-overload]
    eos = frozenset(params.pop("eos", ()))  # type: ignore[arg-type]
    params.setdefault("temperature", 0.0)
    return Entry(slot, f"r{slot}", tokens, prompt, SamplingParams(**params), seed, eos, blocks)  # type: ignore[arg-type]


def row(slot: int, start: int, length: int, new: tuple[int, ...] = (), samples: bool = True) -> Row:
    return Row(slot, start, length, new, samples)
