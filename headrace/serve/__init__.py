"""The engine thread, text in and out, and the OpenAI HTTP API."""
