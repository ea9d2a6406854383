#!/bin/sh
# Print the best Python for this project: 3.12 (fairseq has a wheel), then 3.13 and 3.11 (fairseq is built from
# source). An interpreter only counts if it runs and can make virtual environments.
# A test compares these versions with pyproject.toml.
for version in 3.12 3.13 3.11; do
    minor=${version#3.}
    for candidate in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version"*/bin/python3 python3 python; do
        if "$candidate" -c "import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, $minor))" >/dev/null 2>&1; then
            if [ "$version" != 3.12 ] && ! command -v c++ >/dev/null 2>&1; then
                echo "Python $version builds fairseq from source and needs a C++ compiler (g++); install one, or Python 3.12" >&2
                exit 1
            fi
            echo "$candidate"
            exit 0
        fi
    done
done
echo "no usable Python 3.12, 3.13 or 3.11 found (with venv); install one, or name it: make setup PYTHON=/path/to/python3.12" >&2
exit 1
