"""Where things are kept between runs that can be made again."""

import os
from pathlib import Path


def user_cache(name: str) -> Path | None:
    """The folder of this name in the user's cache, made if need be; None where it cannot be written."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "jaxhybrid" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
