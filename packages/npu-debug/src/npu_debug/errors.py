"""The error that every reader of this package raises when its input cannot be used."""


class InputError(Exception):
    """An input that cannot be used. The message is one paragraph: what, where, and how to put it right."""
