"""Sizes that come in few values, so that few programs are compiled."""


def bucket(n: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(n - 1, 0).bit_length()
