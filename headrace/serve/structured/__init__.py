"""Constraints for structured output, made from what APIs send."""
