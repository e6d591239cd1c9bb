"""Runs the HTTP application: listening, connections, garbage collection, start and drain."""
