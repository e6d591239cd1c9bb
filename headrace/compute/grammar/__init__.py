"""Structured output: constraints compiled to grammars, and the tokens that each grammar allows next.

- `sources`: a constraint's source as a grammar of llguidance.
- `schemas`: JSON schemas as rules whose texts satisfy them exactly.
- `decimals`: regular expressions of the decimal texts of a range of numbers.
- `strings`: terminals of JSON strings: lengths, patterns, formats.
- `rules`: rules under construction, without what derives no text.
- `neutral`: schemas without keywords that allow everything.
- `lark`: grammars in Lark's notation, or in GBNF, as llguidance takes them.
- `call_arguments`: arguments of tool calls that are not written as JSON.
- `refusals`: errors of llguidance in one line.
- `compiler`: compilation on threads, and the cache of compiled grammars.
- `reasoning`: the reasoning's tokens of one sequence, counted, and the end marker when they are used up.
- `matchers`: each slot's grammar state and mask, computed during the forward pass.
- `forced_runs`: the tokens that grammars force next, which become drafts.
"""
