"""Names of models and texts as they are recorded in files that do not depend on where they were made."""

from pathlib import PurePath


def without_place(name: str | None) -> str | None:
    """The last two parts of a path, so that files made in two places have the same bytes."""
    return None if name is None else "/".join(PurePath(name).parts[-2:])
