"""Sampling, batched over rows: from logits to tokens.

- `sampler`: the sampling parameters of all slots, and the sampling of a step.
- `step_sampling`: from the last states of a step to its tokens and scores.
- `lines`: the logits of a step, one line for each token to draw, and which drawn tokens count.
- `allowed`: the tokens that a grammar allows.
- `constraints`: logit_bias, allowed_token_ids, bad_words, min_tokens.
- `penalties`: repetition, presence and frequency penalties.
- `choice`: temperature, filters and draw of one token per row. `filters`: min-p, top-k, top-p.
- `draw`: the likeliest token, or a draw by a uniform number.
- `generator`: the counter-based random generator.
- `logprobs`: log-probabilities of chosen tokens.
"""
