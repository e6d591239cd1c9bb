"""Builds experiments and the tuner of a server: settings, dry runs and rehearsals."""
