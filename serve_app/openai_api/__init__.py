"""The HTTP side: OpenAI's request and response schemas, and a FastAPI application over a ``Backend``."""
