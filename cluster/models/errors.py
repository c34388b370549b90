"""The one error type for everything that keeps a model or tokenizer from being used."""


class ModelError(ValueError):
    """A model or tokenizer cannot be found, loaded or used; the message says why and what to do about it."""
