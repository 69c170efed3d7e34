"""Errors meant for users: each message is one line that names the thing and the remedy."""


class JaxHybridError(Exception):
    """Base of every error this package raises on purpose. Commands exit with code 1."""


class UsageError(JaxHybridError, ValueError):
    """An argument cannot be used as given. Commands exit with code 2."""


class HparamsError(JaxHybridError, ValueError):
    """A field of a model's configuration is missing, contradictory or out of range."""


class CheckpointError(JaxHybridError):
    """Model files are missing, damaged, or do not fit the configuration."""


class TokenizerError(JaxHybridError):
    """The tokenizer or its chat template is missing or unusable."""


class BatchError(JaxHybridError, ValueError):
    """A batch breaks a rule; there is one subclass per rule."""


class RefusedError(JaxHybridError):
    """An operation on a cache cannot be done exactly, or names what is not there; nothing was changed."""


class CacheFullError(JaxHybridError):
    """A batch needs more cells or slots than a cache has free."""
