"""Structured output: constraints compiled to grammars, and the tokens that each grammar allows next.

- `sources`: a constraint's source as a grammar of llguidance: JSON schemas, Lark, GBNF, regular expressions, choices.
- `schemas`: JSON schemas as rules whose texts satisfy them exactly.
- `decimals`: regular expressions of the decimal texts of a range of numbers.
- `strings`: terminals of JSON strings: lengths, patterns, formats.
- `rules`: rules under construction, without what derives no text.
- `call_arguments`: arguments of tool calls that are not written as JSON.
- `compiler`: compilation on threads, the cache of compiled grammars, and the reasoning budget of a sequence.
- `matchers`: each slot's grammar state and mask, computed during the forward pass, and the tokens that it forces next.
"""
