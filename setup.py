"""pyproject.toml describes the package; this file says what it requires, and refuses other Pythons at once.

A checkout requires fairseq, so that `pip install .` installs the whole plugin. A source distribution, and so the wheel
of a package index, leaves it to the extra `fairseq`: who only adapts models of Hugging Face never builds it.

Some versions of pip look at requires-python only after they have fetched, or even built, the requirements.
"""

import sys
import tomllib
from pathlib import Path

from setuptools import setup

REQUIRED = [
    "torch>=2.6",
    "numpy>=1.21",
    "scipy>=1.8",
    "numba>=0.58",  # compiles the inner loop of the active-set solver
    "sentencepiece>=0.2",
    "packaging>=22",
    "tqdm",
]
root = Path(__file__).parent
is_checkout = not (root / "PKG-INFO").exists()  # which every source distribution has
project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
distribution = setup(install_requires=REQUIRED + project["optional-dependencies"]["fairseq"] * is_checkout)
python = ".".join(map(str, sys.version_info[:3]))
if python not in distribution.python_requires:
    raise SystemExit(f"mlsm_plugin needs Python {distribution.python_requires}, and this is Python {python}")
