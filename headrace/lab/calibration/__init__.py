"""Calibrates the simulator: `measure` times steps of a real engine, `values` fits step times and stores them."""
