"""Builds experiments and the tuner of a server."""
