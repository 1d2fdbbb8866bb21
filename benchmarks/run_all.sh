#!/usr/bin/env bash
# Measures all CPU results of benchmarks/results, on one machine and at one commit, plots them and
# writes the tables of docs/.
#
#   benchmarks/run_all.sh [PART...]
#
# Parts, all by default: ablation activations budgets bytes calls host instructions integrations
# memory models networks norms peaks products small steps tools training. On two calm cores, with
# nothing else running, models takes 90 minutes, networks an hour, bytes and budgets half an hour
# each, tools 21 minutes. Next to models peaks took 101 minutes.
# PYTHON names an interpreter with the package and its extras models and demo.
set -euo pipefail
cd "$(dirname "$0")/.."

known="ablation activations budgets bytes calls host instructions integrations memory models networks norms"
known+=" peaks products small steps tools training"
for part in "$@"; do
  [[ " $known " == *" $part "* ]] || {
    sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 2
  }
done
wanted=" ${*:-$known} "
failed=""
python=${PYTHON:-python3}
export OMP_NUM_THREADS=2
out=$(mktemp -d) # not results/: changed files there would mark the rows' commit as modified

# bench PART SCRIPT OPTIONS...: runs benchmarks/bench_SCRIPT.py.
bench() {
  local part=$1 script=$2
  shift 2
  [[ $wanted == *" $part "* ]] || return 0
  echo "== $part, $(date +%H:%M)"
  "$python" "benchmarks/bench_$script.py" "$@" --out "$out/${part}_cpu.csv" || failed+=" $part"
}

bench ablation networks ablation --device cpu
bench activations ops time --device cpu
bench budgets budgets --device cpu --scripts
bench bytes networks bytes --device cpu
bench calls networks calls --device cpu
bench host ops host --device cpu --threads 1
bench instructions instructions
bench integrations networks train --selection integrations --device cpu
bench memory ops memory --device cpu
bench tools networks train --selection tools --device cpu
bench models models
bench networks networks train --device cpu
bench norms bandwidth norms --device cpu
bench peaks networks train --memory-only --device cpu --scale-batch 4 --policies "CUDA autocast" \
  --networks EfficientNet-B0 ResNet-50 DenseNet-121 ConvNeXt-T YOLOv8n "diffusion U-Net" \
  nnU-Net-like ViT-S/16 "Llama blocks" "Llama, 2 layers"
bench products products --device cpu
bench small networks small --device cpu
bench steps networks steps --device cpu
bench training training --device cpu

mv "$out"/*.csv benchmarks/results/
rmdir "$out"
"$python" benchmarks/report.py --pictures
[[ -z $failed ]] || {
  echo "not all rows were measured:$failed" >&2
  exit 1
}
