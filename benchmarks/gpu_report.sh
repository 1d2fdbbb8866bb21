#!/usr/bin/env bash
# On a machine with a GPU: builds, tests, checks the kernels' memory accesses, and measures.
#
#   benchmarks/gpu_report.sh OUT [--device cpu] [PART...]
#
# Parts, all by default: build tests memcheck racecheck initcheck bandwidth activations host memory
# networks tuning. OUT/parts.csv remembers which passed: a second call runs only the others (and
# build, quick where nothing changed). A part that fails or runs into its time limit does not stop
# the next; what it has measured is written. OUT gets the result files (*.csv), log.txt and
# summary.md. Nothing is installed; PYTHON names the interpreter.
# --device cpu runs all of it on the CPU with small sizes, to see that it works.
set -uo pipefail

usage() {
  sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'
  exit 2
}

[ $# -ge 1 ] && [[ $1 != -* ]] || usage
mkdir -p "$1" || exit
out=$(cd "$1" && pwd)
shift
cd "$(dirname "$0")/.." || exit

device=cuda
known="build tests memcheck racecheck initcheck bandwidth activations host memory networks tuning"
wanted=""
while [ $# -gt 0 ]; do
  case $1 in
    --device)
      device=${2:-}
      shift
      ;;
    *) wanted+=" $1" ;;
  esac
  shift
done
[[ $device =~ ^(cpu|cuda)$ ]] || usage
for part in $wanted; do [[ " $known " == *" $part "* ]] || usage; done

python=${PYTHON:-python3}
log=$out/log.txt
parts=$out/parts.csv
failed=0
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
[ -e "$parts" ] || echo "part,device,result,seconds,limit" >"$parts"

# run PART LIMIT COMMAND...: within LIMIT seconds, unless it is not wanted or has passed before.
run() {
  local part=$1 limit=$2 begin=$SECONDS result status
  shift 2
  [[ " ${wanted:-$known} " == *" $part "* ]] || return
  if [ "$part" != build ] && grep -q "^$part,$device,passed," "$parts"; then
    echo "== $part: passed before"
    return
  fi
  echo "== $part: $*" | tee -a "$log"
  timeout -k 10 "$limit" "$@" >"$out/$part.log" 2>&1
  status=$?
  cat "$out/$part.log" >>"$log"
  case $status in
    0) result=passed ;;
    124 | 137) result="time limit" ;;
    *) result="failed ($status)" ;;
  esac
  if [ $status -ne 0 ]; then
    failed=1
    tail -n 20 "$out/$part.log"
  fi
  rm "$out/$part.log"
  echo "== $part: $result after $((SECONDS - begin)) s" | tee -a "$log"
  sed -i "/^$part,$device,/d" "$parts"
  echo "$part,$device,$result,$((SECONDS - begin)),$limit" >>"$parts"
}

bench() {
  local name=$1 limit=$2
  shift 2
  run "$name" "$limit" "$python" "benchmarks/bench_$name.py" --device "$device" \
    --out "$out/${name}_$device.csv" "$@"
}

# Without the caching allocator a tensor is an allocation of its own, whose end the tool knows.
sanitize() {
  local tool=$1
  shift
  run "$tool" 150 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    compute-sanitizer --tool "$tool" "$@" --error-exitcode 1 \
    "$python" -m pytest -q -p no:cacheprovider tests/test_every_kernel.py
}

if [ "$device" = cuda ]; then
  export FORCE_CUDA=1
  TORCH_CUDA_ARCH_LIST=$("$python" -c \
    'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))') || exit
  export TORCH_CUDA_ARCH_LIST
  run build 180 "$python" setup.py build_ext --inplace --force
  workers=()
  "$python" -c 'import xdist' 2>/dev/null && workers=(-n 8)
  # What a GPU is needed for, also where a library that one file imports is missing.
  run tests 400 env OMP_NUM_THREADS=2 "$python" -m pytest -q -rfE \
    --continue-on-collection-errors -k "cuda or fuzz or info" "${workers[@]}"
  sanitize memcheck --report-api-errors no # PyTorch probes with calls that may fail
  sanitize racecheck
  sanitize initcheck
  bench bandwidth 150
  bench activations 240 --compile --elements $((2 ** 16)) $((2 ** 22)) $((2 ** 26))
  bench host 30
  bench memory 30
  bench networks 540
  run tuning 400 "$python" benchmarks/tune_cuda.py --out "$out/tune_cuda.csv"
else
  export FORCE_CPU=1
  echo "memcheck, racecheck, initcheck, tuning: skipped, they are of CUDA kernels" | tee -a "$log"
  run build 400 "$python" setup.py build_ext --inplace --force
  run tests 400 "$python" -m pytest -q -rfE
  bench bandwidth 100 --repetitions 3
  bench activations 100 --compile --elements 65536 --dtypes float32 --repetitions 3
  bench host 30 --repetitions 3
  bench memory 30 --size 1000
  bench networks 200 --networks EfficientNet-B0 YOLO-like \
    --modes float32 "bfloat16, channels_last" --repetitions 2
fi

{
  echo "# Report"
  echo
  echo '```'
  "$python" -m inplace_ops info
  echo '```'
  echo
  sed 's/,/ | /g; s/^/| /; s/$/ |/; 1s/$/\n|---|---|---|---|---|/' "$parts"
  "$python" benchmarks/readme_tables.py --print "$out"
} >"$out/summary.md" 2>&1 || failed=1
echo
cat "$out/summary.md"
exit $failed
