"""Find out which fairseq is installed, and whether it can work, without importing it.

``pip check`` reports other packages that are missing, or have another version than ``pyproject.toml`` requires.
"""

import re
import subprocess
import sys
from importlib import metadata

DISTRIBUTION = "mlsm_plugin"
INSTALL = "pip install -c constraints.txt"
FIXED = "fairseq-fixed"
ORIGINAL = "fairseq"  # does not import on Python 3.11 and newer
NO_FAIRSEQ = (3, 14)  # the first Python on which neither imports
DEVELOPMENT = re.compile(r"extra == .(docs|test|dev)\b")
# the subcommands of `mlsm` that work where fairseq is not installed
WITHOUT_FAIRSEQ = (
    "adapt",
    "binarize --format sequences",
    "encode (sequences)",
    "convert (dictionaries)",
    "infill (T5)",
    "evaluate encoder (Hugging Face models)",
    "finetune (Hugging Face models)",
    "search",
    "explore",
)


def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        # an interrupted installation can leave a folder without a version
        return metadata.version(distribution) or None
    except metadata.PackageNotFoundError:
        return None


def fairseq_problem() -> str | None:
    """Why fairseq cannot be used, and the fix, in one line; None if it can."""
    fixed = installed_version(FIXED)
    original = installed_version(ORIGINAL)
    install = f"{INSTALL} {FIXED}" if requires_fairseq() else f"pip install '{DISTRIBUTION}[fairseq]'"
    if fixed and original:
        return (
            f"fairseq {original} and fairseq-fixed {fixed} are both installed and overwrite each other; "
            f"fix: pip uninstall fairseq fairseq-fixed; {install}"
        )
    if original:
        return f"fairseq {original} does not import on Python 3.11 and newer; fix: pip uninstall fairseq; {install}"
    if sys.version_info >= NO_FAIRSEQ:
        return "fairseq does not import on Python {}.{} and newer; use an older one".format(*NO_FAIRSEQ)
    return None if fixed else f"fairseq is missing; fix: {install}"


def requires_fairseq() -> bool:
    """Whether this installation requires fairseq. A checkout does; in a wheel, fairseq is an extra."""
    try:
        needed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return True
    return any(text.startswith(FIXED) and "extra ==" not in text for text in needed) and sys.version_info < NO_FAIRSEQ


def versions() -> dict[str, str | None]:
    """The versions of fairseq and of all requirements of this package and its extras; None if not installed."""
    try:
        needed = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        needed = []
    names = [re.split(r"[^\w.-]", text)[0] for text in needed if not DEVELOPMENT.search(text)]
    # an extra may name another extra of this package
    return {name: installed_version(name) for name in (FIXED, *names) if name != DISTRIBUTION}


def conflicts() -> list[str]:
    """The lines of ``pip check`` about this package and its requirements."""
    command = [sys.executable, "-m", "pip", "check"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    distributions = {name.lower().replace("_", "-") for name in (DISTRIBUTION, *versions())}
    return [line for line in lines if line.split(" ")[0].lower().replace("_", "-") in distributions]


def import_compiled_parts() -> None:
    """Import the compiled modules for datasets; ImportError if one is missing or does not fit this Python."""
    from fairseq.data import data_utils_fast, token_block_utils_fast  # noqa: F401
