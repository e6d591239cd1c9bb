"""Constraints for structured output.

- `constraints`: JSON schemas, tool calls and structural tags as constraints.
"""
