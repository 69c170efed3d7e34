"""Text that arrives piece by piece: detokenize it without broken characters, cut it at stops."""

from collections.abc import Iterable

from jaxhybrid.errors import UsageError
from jaxhybrid.text import Tokenizer

_BROKEN = "\ufffd"  # what decoding writes for bytes that are no character, or not yet one
