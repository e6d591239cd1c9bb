"""Weights in few bits: one internal layout, the formats that hold it on disk, and how to make it."""
