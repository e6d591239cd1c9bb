"""Turns plans into tokens: models, kernels, sampling, the runner. Knows torch; never the scheduler."""
