"""The benchmark: one client, one set of definitions, any target."""
