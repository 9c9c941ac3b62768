#!/usr/bin/env bash
# Write the hashed lock files from locks/*.in. Each .in file is already complete and exact, so
# nothing is resolved here: uv only adds the hashes of every file of a release, whatever its
# Python or platform. Run it as `make lock` after a change to a pin.
set -euo pipefail
cd "$(dirname "$0")/.."

UV="${UV:-.venv/bin/uv}"
for name in cpu cuda dev peers; do
    # --no-deps: torchrec asks for fbgemm-gpu, the CUDA wheel, which breaks a CPU machine.
    "$UV" pip compile "locks/$name.in" \
        --output-file "locks/$name.txt" \
        --no-deps --universal --python-version 3.11 --generate-hashes \
        --no-annotate --no-header --no-emit-index-url --no-emit-find-links \
        --quiet
    sed -i "1i # Made from $name.in by scripts/lock.sh. Install with: pip install --no-deps --require-hashes -r locks/$name.txt" \
        "locks/$name.txt"
    printf 'locks/%s.txt: %s packages\n' "$name" "$(grep -c '==' "locks/$name.txt")"
done
if grep -nE 'https?://|file://' locks/*.txt; then
    echo "a lock file names a registry; take the lines above out" >&2
    exit 1
fi
