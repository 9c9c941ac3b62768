#!/usr/bin/env bash
# Print the Python to build .venv with, or say in one line what has to be installed first.
set -euo pipefail

# The release each package is locked at has wheels for these.
candidates=(python3 python3.11 python3.12 python3.13)
if [[ -n "${PYTHON:-}" ]]; then
    candidates=("$PYTHON")
fi

chosen=""
for python in "${candidates[@]}"; do
    if command -v "$python" >/dev/null && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        chosen="$python"
        break
    fi
done
if [[ -z "$chosen" ]]; then
    echo "rankopt needs Python 3.11 or newer (looked for ${candidates[*]}). Debian and Ubuntu: apt-get install python3.11 python3.11-venv python3.11-dev; or name one: make PYTHON=/path/to/python3" >&2
    exit 1
fi
if ! "$chosen" -c 'import ensurepip, venv' 2>/dev/null; then
    echo "$chosen cannot make virtual environments. Debian and Ubuntu: apt-get install $("$chosen" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2
    exit 1
fi
compiler="${CXX:-}"
if [[ -z "$compiler" ]]; then
    for name in c++ g++ clang++; do
        if command -v "$name" >/dev/null; then
            compiler="$name"
            break
        fi
    done
fi
if [[ -z "$compiler" ]] || ! command -v "${compiler%% *}" >/dev/null; then
    echo "rankopt needs a C++17 compiler with OpenMP${CXX:+ (CXX=$CXX is not one)}. Debian and Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++" >&2
    exit 1
fi
echo "$chosen"
