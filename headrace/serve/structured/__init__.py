"""Constraints for structured output, made from what APIs send.

- `constraints`: JSON schemas, tool calls and structural tags as constraints.
"""
