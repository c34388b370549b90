"""Command lines of the engine: generate text, watch it being drafted."""
