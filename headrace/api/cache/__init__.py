"""Endpoints of the response caches: statistics, invalidation, feedback and warming; the recorder of the history."""
