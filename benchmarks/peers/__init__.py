"""Comparison with other engines on the same weights, requests, client and cores."""
