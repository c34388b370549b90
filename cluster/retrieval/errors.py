"""The one error type for corpora that cannot be built, opened or used."""


class CorpusError(ValueError):
    """A corpus or its input is unusable as asked; the message names the file or value and says what to do."""
