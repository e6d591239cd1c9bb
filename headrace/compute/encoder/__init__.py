"""Sentence encoders: text to one unit vector each, for the semantic cache."""
