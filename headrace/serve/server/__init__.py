"""The OpenAI HTTP API over `serve.service`: wire types, routes, streams, errors."""
