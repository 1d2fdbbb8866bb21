#!/usr/bin/env bash
# Measures all CPU results of benchmarks/results, on one machine and at one commit, plots them and
# writes the tables of docs/.
#
#   benchmarks/cpu_results.sh [PART...]
#
# Parts, all by default: activations blocks bytes host memory models networks steps training. On two
# calm cores, with nothing else running, models and networks take an hour each, training takes 18
# minutes, and the others together about half an hour. PYTHON names an interpreter with the package
# and its extras models and demo.
set -euo pipefail
cd "$(dirname "$0")/.."

known="activations blocks bytes host memory models networks steps training"
for part in "$@"; do
  [[ " $known " == *" $part "* ]] || {
    sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 2
  }
done
wanted=" ${*:-$known} "
python=${PYTHON:-python3}
export OMP_NUM_THREADS=2
out=$(mktemp -d) # not results/: changed files there would mark the rows' commit as modified

bench() {
  local part=$1
  shift
  [[ $wanted == *" $part "* ]] || return 0
  echo "== $part, $(date +%H:%M)"
  "$python" "benchmarks/bench_$part.py" --out "$out/${part}_cpu.csv" "$@"
}

bench activations --device cpu
bench blocks --device cpu
bench bytes --device cpu
bench host --device cpu --threads 1
bench memory --device cpu
bench models
bench networks --device cpu --policies float32 bfloat16 "CUDA autocast"
bench steps --device cpu
bench training --device cpu

mv "$out"/*.csv benchmarks/results/
rmdir "$out"
"$python" benchmarks/plot.py
"$python" benchmarks/tables.py
