#!/bin/sh
# Checks that need a GPU, in under 8 minutes on one: losses against the CPU's, torch's CUDA sanitizer with a planted
# missing wait, peak memory of a 1B-parameter model, and a profile without unintended synchronisation.
#
#   scripts/gpu_check.sh          the whole of it, on a machine with a GPU
#   scripts/gpu_check.sh --cpu    the half that needs none: the same training on gloo against one process
#
# PYTHON=... names an interpreter with torch, deepspeed and this package's requirements.
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
check() { echo "== $*"; "$PYTHON" -m scripts.gpu_check "$@"; }

if [ "${1:-}" = "--cpu" ]; then
    export DS_ACCELERATOR=cpu
    check losses --device cpu --ranks 1
    check losses --device cpu --ranks 2
    exit
fi
check losses --device cuda --backend nccl --ranks 1
check losses --device cuda --backend gloo --ranks 2
TORCH_CUDA_SANITIZER=1 check losses --device cuda --backend gloo --ranks 2 --steps 2
echo "== the planted missing wait must be caught, by the sanitizer or by the losses"
if TORCH_CUDA_SANITIZER=1 check losses --device cuda --backend gloo --ranks 2 --steps 2 --plant-missing-wait; then
    echo "it was not caught" >&2
    exit 1
fi
check memory --device cuda --backend nccl
check profile --device cuda --backend nccl
