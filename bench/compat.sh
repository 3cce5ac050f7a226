#!/usr/bin/env bash
# Runs the test suite on another Python or torch, in a virtual environment of its own. By hand; CI runs Python 3.11.
#   bench/compat.sh python3.12
#   bench/compat.sh python3.12 'torch==2.11.*' 'transformers==5.17.*'
set -euo pipefail
python=${1:?usage: bench/compat.sh PYTHON [REQUIREMENT ...]}
shift
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m venv "$scratch/venv"
source "$scratch/venv/bin/activate"
# the constraints without the pins that the given requirements replace
names=$(printf '%s\n' "$@" | sed 's/[=<>!~].*//')
grep -vixFf <(printf '%s\n' "$names" | sed '/^$/d' | while read -r name; do grep -i "^$name==" constraints.txt; done) \
  constraints.txt > "$scratch/constraints.txt" || cp constraints.txt "$scratch/constraints.txt"
pip install -q -c "$scratch/constraints.txt" "$@" -e '.[test]'
python - <<'P'
import sys, torch, transformers
print(f"python {sys.version.split()[0]}, torch {torch.__version__}, transformers {transformers.__version__}")
P
pytest
