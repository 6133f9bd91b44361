"""The OpenAI HTTP API: schemas, routes, streaming, limits of connections."""
