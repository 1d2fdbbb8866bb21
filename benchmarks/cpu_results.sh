#!/usr/bin/env bash
# Measures all that benchmarks/results has of the CPU, on one machine and of one commit, draws it and
# writes the tables of docs/.
#
#   benchmarks/cpu_results.sh [PART...]
#
# Parts, all by default: activations blocks host memory models peers saved steps training. On two calm
# cores, with nothing else running, they take about 40 minutes together without peers, which take half
# an hour, most of it to compile, and training, which takes 18 minutes. PYTHON names an interpreter
# that has the package with .[models,demo].
set -euo pipefail
cd "$(dirname "$0")/.."

known="activations blocks host memory models peers saved steps training"
for part in "$@"; do
  [[ " $known " == *" $part "* ]] || {
    sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'
    exit 2
  }
done
wanted=" ${*:-$known} "
python=${PYTHON:-python3}
export OMP_NUM_THREADS=2
out=$(mktemp -d) # not yet to results: rows name a commit, and whether files differ from it

bench() {
  local part=$1
  shift
  [[ $wanted == *" $part "* ]] || return 0
  echo "== $part, $(date +%H:%M)"
  "$python" "benchmarks/bench_$part.py" --device cpu --out "$out/${part}_cpu.csv" "$@"
}

bench activations
bench blocks
bench host --threads 1
bench memory
bench peers
bench saved
bench steps
bench models timm:{efficientnet_b0,regnety_016,cspdarknet53} ultralytics:{yolov8n,yolo11n}.yaml \
  torchvision:{mobilenet_v2,mobilenet_v3_large,efficientnet_v2_s,densenet121,resnet50,vgg16_bn} \
  unets:{SegmentationUNet,DiffusionUNet} \
  --variants convert "convert, max_ops=8" --batch 8 2 --size 224 128
bench training

mv "$out"/*.csv benchmarks/results/
rmdir "$out"
"$python" benchmarks/plot.py
"$python" benchmarks/tables.py
