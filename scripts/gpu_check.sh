#!/usr/bin/env bash
# Run every test that needs an NVIDIA GPU and a short peer bench, in under ten minutes; the last line
# is one JSON object. Without a GPU it says so and ends with 0.
#
#   scripts/gpu_check.sh              on the machine with the GPU; PYTHON chooses the interpreter
#   scripts/gpu_check.sh --collect    elsewhere, with a network: fetch into .whl what a machine that
#                                     has nothing but torch lacks; carry that folder along
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}"
TEST_SECONDS="${TEST_SECONDS:-380}"
BENCH_SECONDS="${BENCH_SECONDS:-150}"
# Of the releases beside torch 2.11, which such machines have; RANKOPT_WHEELS names others.
WHEELS="${RANKOPT_WHEELS:-pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0
    typing-inspection==0.4.5 fbgemm-gpu-cpu==1.6.0 torchrec==1.6.0 tensordict==0.15.3
    pyvers==0.2.3 orjson==3.13.0 importlib-metadata==10.2.0 iopath==0.1.10 plotly==7.1.0
    cloudpickle==3.1.3 annotated-doc==0.0.7}"

if [ "${1:-}" = --collect ]; then
    mkdir -p .whl
    for wheel in $WHEELS; do
        "$PYTHON" -m pip --disable-pip-version-check download -q --no-deps --only-binary=:all: \
            --python-version "${TARGET_PYTHON:-3.12}" --implementation cp \
            --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
            --platform manylinux2014_x86_64 -d .whl "$wheel" || echo "not fetched: $wheel" >&2
    done
    ls .whl
    exit 0
fi

if compgen -G '.whl/*.whl' >/dev/null; then
    site="$(mktemp -d)"
    "$PYTHON" -m pip --disable-pip-version-check install -q --no-index --no-deps --no-compile \
        --target "$site" .whl/*.whl || echo "the wheels in .whl could not be installed" >&2
    export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

exec "$PYTHON" scripts/gpu_check.py "$TEST_SECONDS" "$BENCH_SECONDS"
