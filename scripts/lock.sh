#!/usr/bin/env bash
# Regenerates requirements/cpu.lock and requirements/torch-cuda-libs.lock from requirements/cpu.in. Needs `uv`.
#
# The resolver sees torch's CUDA build, because that is the one on every index. Its libraries go to a lock of their own,
# so that an environment with the CPU build does without them.
set -euo pipefail
cd "$(dirname "$0")/../requirements"

uv pip compile cpu.in --override overrides.txt --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --generate-hashes --no-header --quiet --output-file all.lock

python3 - <<'PY'
import re
from pathlib import Path

CUDA = re.compile(r"(nvidia-|cuda-|triton==)")
blocks = re.split(r"\n(?=[a-z0-9])", Path("all.lock").read_text().rstrip("\n"))
cuda = [block for block in blocks if CUDA.match(block)]
cpu = [block for block in blocks if not CUDA.match(block)]
Path("torch-cuda-libs.lock").write_text("\n".join(cuda) + "\n")
Path("cpu.lock").write_text("\n".join(cpu) + "\n")
PY
rm all.lock
