"""Calibrating the semantic cache on labelled questions, and comparing it with simpler rules."""
