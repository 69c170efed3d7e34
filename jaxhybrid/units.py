"""Numbers as people read them."""


def readable_size(n: float) -> str:
    """Bytes: 999 B, 1.0 kB, 1.0 MB, 1000.0 GB."""
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} GB"


def readable_count(n: float) -> str:
    """A number of things: 999, 1.23 k, 12.3 M, 123 B."""
    for unit in ("", " k", " M"):
        if n < 1000:
            return f"{n:.3g}{unit}"
        n /= 1000
    return f"{n:.4g} B"
