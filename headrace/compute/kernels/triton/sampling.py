"""Sampling on the device without a sort: penalties and grammar masks, filters and draw, and the drafts that count.

A filter keeps the tokens whose distance from the largest logit is at most a limit. The limit of top-k and of top-p is
found digit by digit in the bits of that distance, which as integers have the order of the numbers: each of eight
passes over the row weighs what lies within sixteen limits. No program looks at another row, and each adds in an order
that depends on the vocabulary alone, so a row's token is the same in every batch.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOT_FINITE = tl.constexpr(-1)
NOTHING_ALLOWED = tl.constexpr(-2)
_NEARLY_ONE = tl.constexpr(1.0 - 2.0**-52)


@triton.jit
def _fault(token, peak, wrong):
    """``token``, or the fault of a row whose largest logit is ``peak``; see `choice.or_fault`."""
    token = tl.where(peak == float("-inf"), NOTHING_ALLOWED, token)
    return tl.where(wrong | (peak == float("inf")), NOT_FINITE, token)


@triton.jit
def _peak(line, vocab, BLOCK: tl.constexpr):
    """The largest logit of a row, its first token, and whether any is no number."""
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    wrong = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocab, BLOCK):
        token = begin + lane
        logit = tl.load(line + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
        wrong = wrong | (logit != logit).to(tl.int32)
        where = tl.where(logit > best, token, where)
        best = tl.where(logit > best, logit, best)
    peak = tl.max(best, 0)
    first = tl.min(tl.where(best == peak, where, vocab), 0)
    return peak, first, tl.max(wrong, 0) > 0


@triton.jit
def likeliest(logits, out, vocab, BLOCK: tl.constexpr):
    """The first token of the largest logit."""
    row = tl.program_id(0)
    peak, first, wrong = _peak(logits + row.to(tl.int64) * vocab, vocab, BLOCK)
    tl.store(out + row, _fault(first, peak, wrong).to(tl.int64))


# fmt: off
@triton.jit
def _distance(line, begin, vocab, peak, heat, BLOCK: tl.constexpr):
    """How far the scaled logits of a block lie below the largest, and which of them exist."""
    token = begin + tl.arange(0, BLOCK)
    logit = tl.load(line + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    return (peak - logit) / heat, token < vocab


@triton.jit
def _limit(line, vocab, peak, heat, limit, target, COUNTED: tl.constexpr, BLOCK: tl.constexpr):
    """The smallest distance within which, of what is within ``limit``, ``target`` tokens (or weight) lie."""
    digit = tl.arange(0, 16)
    bits = peak.to(tl.int32) * 0
    for step in tl.static_range(8):
        last = bits + (((digit + 1) << (28 - 4 * step)) - 1)
        if step == 0:
            last = tl.where(digit < 7, last, 0x7FFFFFFF)
        weights = tl.zeros([BLOCK, 16], tl.float32)
        for begin in range(0, vocab, BLOCK):
            distance, exists = _distance(line, begin, vocab, peak, heat, BLOCK)
            weight = tl.exp(-distance)
            if COUNTED:
                weight = weight * 0 + 1
            weight = tl.where(exists & (distance <= limit), weight, 0.0)
            within = distance.to(tl.int32, bitcast=True)[:, None] <= last[None, :]
            weights += tl.where(within, weight[:, None], 0.0)
        short = tl.sum(weights.to(tl.float64), 0) < target
        bits += tl.minimum(tl.sum(short.to(tl.int32), 0), 7 if step == 0 else 15) << (28 - 4 * step)
    bits = tl.minimum(bits, 0x7F800000)  # infinity, if rounding left less than ``target``
    return tl.minimum(bits.to(tl.float32, bitcast=True), limit)


@triton.jit
def _mass(line, vocab, peak, heat, limit, BLOCK: tl.constexpr):
    """Number and weight of the tokens nearer than ``limit``, and the weight of all within it."""
    near = peak.to(tl.float64) * 0
    total = near
    count = near
    for begin in range(0, vocab, BLOCK):
        distance, exists = _distance(line, begin, vocab, peak, heat, BLOCK)
        weight = tl.where(exists & (distance <= limit), tl.exp(-distance), 0.0)
        nearer = exists & (distance < limit)
        total += tl.sum(weight, 0).to(tl.float64)
        near += tl.sum(tl.where(nearer, weight, 0.0), 0).to(tl.float64)
        count += tl.sum(nearer.to(tl.int32), 0).to(tl.float64)
    return count, near, total


@triton.jit
def _draw(line, vocab, peak, heat, limit, target, BLOCK: tl.constexpr):
    """The token at which the weights within ``limit``, added in the order of the tokens, exceed ``target``."""
    running = target * 0
    before = running
    found = vocab * 0 - 1
    last = found
    for begin in range(0, vocab, BLOCK):
        distance, exists = _distance(line, begin, vocab, peak, heat, BLOCK)
        weight = tl.where(exists & (distance <= limit), tl.exp(-distance), 0.0)
        total = tl.sum(weight, 0).to(tl.float64)
        last = tl.where(total > 0, begin, last)
        hit = (found < 0) & (running + total > target)
        before = tl.where(hit, running, before)
        found = tl.where(hit, begin, found)
        before = tl.where((found < 0) & (total > 0), running, before)
        running += total
    found = tl.where(found < 0, tl.maximum(last, 0), found)
    distance, exists = _distance(line, found, vocab, peak, heat, BLOCK)
    weight = tl.where(exists & (distance <= limit), tl.exp(-distance), 0.0).to(tl.float64)
    summed = tl.cumsum(weight, 0)
    # Sums in one and in two steps differ in the last digits: stay inside the block.
    rest = tl.minimum(target - before, tl.max(summed, 0) * _NEARLY_ONE)
    return tl.minimum(found + tl.sum((summed <= rest).to(tl.int32), 0), vocab - 1)


@triton.jit(
    do_not_specialize_on_alignment=["temperature", "min_p", "top_k", "top_p", "uniform"],
)
def choose(logits, out, temperature, min_p, top_k, top_p, uniform, vocab, BLOCK: tl.constexpr):
    """A token by `TokenChoice`: filters, then the inverse of the distribution function at ``uniform``."""
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * vocab
    peak, _, wrong = _peak(line, vocab, BLOCK)
    bounded = (peak > float("-inf")) & (peak < float("inf")) & (wrong == 0)
    top = tl.where(bounded, peak, 0.0)
    heat = tl.load(temperature + row).to(tl.float32)
    share = tl.load(min_p + row).to(tl.float32)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    limit = tl.where(share > 0, -tl.log(tl.where(share > 0, share, 1.0)), float("inf"))
    counted = (k > 0) & (k < vocab)
    mass = p * 0
    if counted:
        limit = _limit(line, vocab, top, heat, limit, k.to(tl.float64), True, BLOCK)
    if p < 1:
        count, near, mass = _mass(line, vocab, top, heat, limit, BLOCK)
        # Of equal tokens at the limit, the nucleus counts as many as top-k has places.
        places = near + (k.to(tl.float64) - count) * tl.exp(-limit).to(tl.float64)
        mass = tl.where(counted, tl.minimum(mass, places), mass)
        limit = _limit(line, vocab, top, heat, limit, p * mass, False, BLOCK)
    _, _, mass = _mass(line, vocab, top, heat, limit, BLOCK)
    token = _draw(line, vocab, top, heat, limit, tl.load(uniform + row) * mass, BLOCK)
    tl.store(out + row, _fault(token, peak, wrong).to(tl.int64))


@triton.jit(
    do_not_specialize_on_alignment=[
        "rows", "lanes", "repetition", "presence", "frequency", "drafts", "begins", "ends"
    ],
)
def penalize(logits, counts, rows, lanes, repetition, presence, frequency, drafts, begins, ends, vocab,
             IN_PROMPT: tl.constexpr, BLOCK: tl.constexpr):
    """Penalties of some tokens of a row, before which there may be drafts that count too; none if they are neutral."""
    line = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    factor = tl.load(repetition + line).to(tl.float32)
    once = tl.load(presence + line).to(tl.float32)
    each = tl.load(frequency + line).to(tl.float32)
    inside = (token < vocab) & (token * 0 + (factor != 1) + (once != 0) + (each != 0) > 0)
    place = logits + tl.load(rows + line) * vocab + token
    seen = tl.load(counts + tl.load(lanes + line) * vocab + token, mask=inside, other=0)
    output = seen & (IN_PROMPT - 1)
    for draft in range(tl.load(begins + line).to(tl.int32), tl.load(ends + line).to(tl.int32)):
        output += (tl.load(drafts + draft) == token).to(tl.int32)
    logit = tl.load(place, mask=inside, other=0.0)
    repeated = tl.where(logit > 0, logit / factor, logit * factor)
    logit = tl.where((output > 0) | (seen >= IN_PROMPT), repeated, logit)
    logit -= each * output.to(tl.float32)
    logit -= tl.where(output > 0, once, 0.0)
    tl.store(place, logit, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["drawn", "drafts", "first", "offsets"])
def accept(drawn, drafts, first, offsets, out):
    """Whether a token counts: all drafts of its row before it are the tokens drawn at their places."""
    line = tl.program_id(0)
    token = tl.load(drawn + line)
    wrong = ((token < 0) & (tl.load(offsets + line) > 0)).to(tl.int32)
    for before in range(tl.load(first + line).to(tl.int32), line):
        wrong |= (tl.load(drawn + before) != tl.load(drafts + before)).to(tl.int32)
    tl.store(out + line, wrong == 0)


@triton.jit(do_not_specialize_on_alignment=["lines", "words"])
def permit(logits, out, lines, words, vocab, width, BLOCK: tl.constexpr):
    """A row with minus infinity in place of the tokens whose bit is not set; ``lines`` names its words, or is below
    zero."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    line = tl.load(lines + row)
    masked = inside & (token * 0 + line >= 0)
    word = tl.load(words + line * width + token // 32, mask=masked, other=-1)
    logit = tl.load(logits + row * vocab + token, mask=inside, other=0.0)
    logit = tl.where(((word >> (token % 32)) & 1) != 0, logit, float("-inf"))
    tl.store(out + row * vocab + token, logit, mask=inside)
# fmt: on
