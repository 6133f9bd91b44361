"""What the engine refuses, and how it says so."""


class UnsupportedModelError(ValueError):
    """The model, its checkpoint or the requested cut cannot be served. The message says which property is the cause."""
