#!/usr/bin/env bash
# Everything a GPU machine is asked for, in one command and under 8 minutes; a short table comes last.
#
#   bench/gpu_check.sh [--wheels DIR] [--dry-run]
#
# --wheels DIR  wheels of packages that the machine lacks: beside torch, triton and transformers that is msgspec, structlog, numba,
#               llvmlite, pytest (with iniconfig, pluggy) and hypothesis (with sortedcontainers); they are unpacked to a folder
#               of this run's own
# --dry-run     the same on the CPU, at toy sizes, kernels by Triton's interpreter: it shows that the script runs
# Without a GPU and without --dry-run it says so and ends well. Nothing is fetched.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
dry=
while (($#)); do
    case $1 in
    --wheels)
        python3 -m pip install -q --no-index --no-deps --no-compile --target "$scratch/site" "$2"/*.whl
        shift 2
        ;;
    --dry-run) dry=1 && shift ;;
    *) echo "unknown option $1" >&2 && exit 2 ;;
    esac
done
export PYTHONPATH="$PWD:$PWD/kernels:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 TRITON_DEFAULT_FP_FUSION=1
if [[ -z $dry ]] && ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "no GPU here: skipped (--dry-run shows that the script runs)"
    exit 0
fi
if [[ -n $dry ]]; then export TRITON_INTERPRET=1; fi
timeout 470 python3 bench/gpu_check.py
