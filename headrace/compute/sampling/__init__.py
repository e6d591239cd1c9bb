"""Sampling, batched over rows: `sampler` orders the steps, each of which is one file beside it."""
