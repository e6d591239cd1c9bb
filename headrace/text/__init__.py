"""Text processing: tokenizer, chat template, streaming detokenizer, and parsers of outputs.

- `template`: renders messages to a prompt with the model's chat template.
- `rendering`: renders one template in jinja2's sandbox. `budget`: what a template may do in the server's process.
- `processes`: renders templates in processes that are ended at their limits. `render_process`: such a process.
- `content`: keeps text of requests that spells a control token text. `quoting`: tokenizes such prompts.
- `tool_prompt`: shows tools where a template does not.
- `tokenizer`: text to tokens and back. `gguf`: tokenizer and templates from a GGUF file's metadata.
- `named_tokens`: special tokens that only files beside the tokenizer name.
- `segments`: tokens of long prompt parts, cached between requests.
- `infill`: prompts for the text between a prefix and a suffix.
- `detokenize`: tokens to text, one at a time.
- `stops`: finds stop strings in a growing text.
- `parsing`: reasoning and tool calls in an output.
- `stream`: the text of one output while its tokens arrive. `first_call`: the same, ended by the first tool call.
"""
