"""Batches: many requests from a file, their results into a file, each exactly once."""
