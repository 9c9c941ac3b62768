#!/usr/bin/env bash
# Make .venv from the lock files: the CUDA set where nvidia-smi answers, else the CPU set.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${VENV:-.venv}"
python="$(bash scripts/prerequisites.sh)"
if [[ ! -x "$VENV/bin/python" ]]; then
    "$python" -m venv "$VENV"
fi
pip=("$VENV/bin/python" -m pip --disable-pip-version-check --no-input)

flavour=cpu
other=fbgemm-gpu
if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
    flavour=cuda
    other=fbgemm-gpu-cpu
fi
echo "rankopt: installing locks/$flavour.txt into $VENV (a few minutes the first time)"

# Both builds of fbgemm write the same files, so the wrong one has to go before the right one comes;
# if it was there, the files it took with it are put back by installing the right one anew.
if "${pip[@]}" show --quiet "$other" >/dev/null 2>&1; then
    "${pip[@]}" uninstall --quiet --yes "$other" fbgemm-gpu fbgemm-gpu-cpu
fi
"${pip[@]}" install --quiet --no-deps --require-hashes -r "locks/$flavour.txt" -r locks/dev.txt
# torch has no hash: the same release is a CPU wheel on one machine and a CUDA one on another. Its
# own dependencies are in place by now, save the nvidia libraries that a CUDA wheel asks for.
# pip would warn that torchrec misses fbgemm-gpu, whose files fbgemm-gpu-cpu provides.
"${pip[@]}" install --quiet --no-warn-conflicts -r locks/torch.txt
"${pip[@]}" install --quiet --no-deps --no-build-isolation -e .
