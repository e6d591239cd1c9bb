"""Folds over the event stream: metrics and explanations."""
