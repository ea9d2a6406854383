#!/usr/bin/env python3
"""Raw text to everything that MLSM training reads: the same code as ``mlsm preprocess``."""

import sys

from mlsm_plugin.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["preprocess", *sys.argv[1:]]))
