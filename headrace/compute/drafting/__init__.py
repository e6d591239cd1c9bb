"""Draft models for speculative decoding: a model or head that proposes tokens for the target to verify."""
