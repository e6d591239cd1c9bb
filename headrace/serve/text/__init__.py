"""Text on its way in and out: tokenizer, chat template, streaming detokenizer."""
