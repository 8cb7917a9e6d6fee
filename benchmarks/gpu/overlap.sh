#!/usr/bin/env bash
# A decode step of one GPU: eager, in two micro-batches on two streams, and captured in a graph. Compares the
# outputs, prints times as a JSON line, and takes less than 4 minutes. Arguments go to overlap.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec timeout 240 "${PYTHON:-python3}" benchmarks/gpu/overlap.py "$@"
