"""Serving: an OpenAI-compatible HTTP application on Ray Serve, over the engine in `cluster`.

``serve run serve_app:app`` serves the embedded model; ``serve run serve_app:build model=…`` any other.
"""

from serve_app.builder import build
from serve_app.settings import ModelSettings, ServeSettings

app = build(ServeSettings())

__all__ = ["ModelSettings", "ServeSettings", "app", "build"]
