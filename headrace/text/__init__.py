"""Text processing: tokenizer, chat template, streaming detokenizer, and parsers of outputs.

- `template`: renders messages to a prompt with the model's chat template, and shows tools where the template does not.
- `rendering`: renders one template in jinja2's sandbox, within a budget.
- `bounded`: processes that are ended at their limits, and the side of such a process.
- `processes`: renders templates in such processes.
- `images`: decoded images of requests, and their limits, and decoding in processes.
- `content`: keeps text of requests that spells a control token text.
- `tokenizer`: text to tokens and back; quoted control tokens, and cached tokens of long prompt parts.
- `gguf`: tokenizer and templates from a GGUF file's metadata.
- `named_tokens`: special tokens that only files beside the tokenizer name, and those that end an answer although none
  does.
- `infill`: prompts for the text between a prefix and a suffix.
- `parsing`: reasoning and tool calls in an output.
- `stream`: the text of one output while its tokens arrive: detokenized, and ended at stop strings or the first tool
  call.
"""
