"""Why a model cannot be prepared."""


class PrepareError(Exception):
    """A sentence for the person who asked for the model."""
