"""Sampling, batched over rows: from logits to tokens.

- `sampler`: the sampling parameters of all slots, their random numbers, and the constraints of single tokens.
- `penalties`: repetition, presence and frequency penalties, and the masks of grammars.
- `choice`: temperature, filters and draw of one token per row.
- `logprobs`: log-probabilities of chosen tokens.
"""
