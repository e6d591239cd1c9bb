"""Text processing: tokenizer, chat template, streaming detokenizer.

- `template`: renders messages to a prompt with the model's chat template.
- `budget`: limits on the time and memory of a template.
- `tokenizer`: text to tokens and back. `named_tokens`: tokens that other files than tokenizer.json name.
- `segments`: tokens of long prompt parts, cached between requests.
- `infill`: prompts for the text between a prefix and a suffix.
- `detokenize`: tokens to text, one at a time.
- `stops`: finds stop strings in a growing text.
- `stream`: the text of one output while its tokens arrive. `first_call`: the same, ended by the first tool call.
"""
