"""OpenAI's endpoints for chat and text completions, and vLLM's for tokens."""
