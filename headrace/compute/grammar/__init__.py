"""Structured output: constraints compiled to grammars, and the tokens that each grammar allows next."""
