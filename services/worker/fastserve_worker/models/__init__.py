"""From what a user calls a model to a folder that every part can read. Only `convert` imports torch."""
