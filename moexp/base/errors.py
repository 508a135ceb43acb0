"""The one exception a user ever sees: what is wrong, where, and what would be valid."""

from __future__ import annotations


class MoexpError(Exception):
    """A mistake in the input (a recipe, a file, a flag), reported as one line and exit code 2.

    Args:
        what: what is wrong, in a few words.
        where: the file, key or flag that holds it.
        valid: what would have been accepted.
    """

    def __init__(self, what: str, *, where: str = "", valid: str = "") -> None:
        self.what, self.where, self.valid = what, where, valid
        position = f" ({where})" if where else ""
        hint = f"; valid: {valid}" if valid else ""
        super().__init__(f"{what}{position}{hint}")
