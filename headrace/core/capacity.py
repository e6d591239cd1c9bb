"""Capacity in blocks and bytes: the one source for start-up sizing, admission, preemption, planner and simulator."""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.request import Request

_SAMPLER_COPIES = 4
"""Float32 copies of the logits that sampling may hold at once (shaped rows, probabilities, sorted candidates)."""

MIN_LOGIT_ROWS = 32  # see docs/decisions/cpu-kernels.md#rows-of-logits-at-once
"""Minimum of the rows of logits that a step may compute at once, because one sequence with drafts has several."""


def max_logit_rows(max_num_seqs: int) -> int:
    """Maximum rows of logits that a step computes at once. More are computed in parts, each of which reads the head."""
    return max(max_num_seqs, MIN_LOGIT_ROWS)


def blocks_needed(tokens: int, block_size: int) -> int:
    """Number of blocks that hold the keys and values of ``tokens`` positions."""
    return -(-tokens // block_size)


class WindowGroups(NamedTuple):
    """Layers whose tokens attend to the last ``tokens`` positions only, in ``groups`` groups; 0 groups: there are none.

    Of a sequence, each group has its own block for each block of positions that the window of the next rows reaches.
    A row computes at most ``chunk`` positions of a prompt.
    """

    groups: int
    tokens: int
    chunk: int

    def first(self, position: int, block_size: int) -> int:
        """The first block that the window of ``position`` reaches."""
        return max(0, position + 1 - self.tokens) // block_size

    def most_blocks(self, tokens: int, block_size: int) -> int:
        """The most blocks that a sequence of ``tokens`` positions ever has in all of these groups at once."""
        spanned = blocks_needed(self.tokens + self.chunk, block_size) + 1
        return self.groups * min(blocks_needed(tokens, block_size), spanned)


NO_WINDOWS = WindowGroups(0, 0, 0)


def most_blocks(tokens: int, block_size: int, windows: WindowGroups = NO_WINDOWS) -> int:
    """The most blocks that a sequence of ``tokens`` positions ever has at once."""
    return blocks_needed(tokens, block_size) + windows.most_blocks(tokens, block_size)


STATE_SHARE = 0.25
"""Share of the KV cache's memory that checkpoints of recurrent states get, unless an option says how much."""


def state_cells(budget: int, needed: int, state_bytes: int, given: int | None) -> int:
    """Number of checkpoints of recurrent states of ``state_bytes`` each (0: the model has none).

    They take the ``given`` bytes. With None they take a share of the ``budget`` of the KV cache that leaves the
    ``needed`` bytes of it.
    """
    if not state_bytes:
        return 0
    share = max(0, min(int(budget * STATE_SHARE), budget - needed))
    return (share if given is None else given) // state_bytes


def activation_bytes(
    *,
    hidden_size: int,
    intermediate_size: int,
    vocab_size: int,
    itemsize: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
) -> int:
    """An upper estimate of a step's activation memory in bytes, in addition to weights and KV cache.

    Per token: residual, its normed copy, attention in and out (8 hidden widths at the widest moment) and the gate-up
    pair with its product (3 intermediate widths). Per row of logits: these and the copies that sampling makes of
    them, in float32. Without sequences (0) there are none.
    """
    per_token = (8 * hidden_size + 3 * intermediate_size) * itemsize
    logits = min(max_logit_rows(max_num_seqs), max_num_batched_tokens) if max_num_seqs else 0
    return max_num_batched_tokens * per_token + logits * (1 + _SAMPLER_COPIES) * vocab_size * 4


def why_unservable(
    request: Request,
    max_model_len: int,
    num_blocks: int,
    block_size: int,
    windows: WindowGroups = NO_WINDOWS,
) -> str:
    """Why a request could never be served, even alone; empty if it can be."""
    prompt = len(request.tokens)
    if not prompt:
        return "the prompt is empty"
    if prompt >= max_model_len:
        return f"the prompt has {prompt} tokens; the limit is {max_model_len - 1}, which leaves room for one token"
    asked = request.params.max_tokens
    longest = max_model_len if asked is None else min(max_model_len, prompt + asked)
    needed = most_blocks(longest, block_size, windows)
    if needed > num_blocks:
        return f"the request may need {needed} KV blocks, but there are only {num_blocks}"
    return ""


class SparseLayers(NamedTuple):
    """Layers in which a token is computed by ``chosen`` of ``experts``; ``size`` is that of one expert, in weights or
    bytes.
    """

    layers: int
    experts: int
    chosen: int
    size: int

    def unused(self, tokens: float) -> float:
        """The size of the experts that no token of a step is expected to have, if all are equally likely."""
        share: float = (1 - self.chosen / self.experts) ** tokens
        return self.layers * self.size * self.experts * share
