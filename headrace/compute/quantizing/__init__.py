"""Writes a quantized copy of a model: calibration on texts, better values than the nearest, and the files."""
