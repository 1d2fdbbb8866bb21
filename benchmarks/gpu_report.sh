#!/usr/bin/env bash
# On a machine with a GPU: builds, tests, checks the kernels' memory accesses, and measures.
#
#   benchmarks/gpu_report.sh OUT [--device cpu] [PART...]
#
# Parts, by default build, right, costs and summary. Two names mean several:
#
# - right: numerics tests memcheck initcheck batches. They measure no time, and run at once.
# - costs: filled products networks steps bandwidth norms. They run one after another.
#
# More parts measure costs: baselines graphs activations host memory bytes tools. Each part has a
# time limit. If a part fails or reaches its limit, the rows that it has measured are written, the
# other parts run, and the exit status is 1.
#
# Each part writes OUT/PART_DEVICE.log, whose last line says how it ended. Parts that measure also
# write OUT/PART_DEVICE.csv. The part summary writes OUT/summary.md about all files in OUT. A part
# whose log says "passed" is not run again. No part needs another part's files in OUT: OUT may be
# emptied between calls, and all files be collected in one folder for the summary. Nothing is
# installed; PYTHON names the interpreter.
#
# --device cpu is a smoke test: it runs what can run on the CPU, with small sizes.
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
right="numerics tests memcheck initcheck batches"
costs="filled products networks steps bandwidth norms"
more="baselines graphs activations host memory bytes tools"
known="build $right $costs $more summary"
wanted=""
while [ $# -gt 0 ]; do
  case $1 in
    --device)
      device=${2:-}
      shift
      ;;
    right) wanted+=" $right" ;;
    costs) wanted+=" $costs" ;;
    *) wanted+=" $1" ;;
  esac
  shift
done
[[ $device =~ ^(cpu|cuda)$ ]] || usage
for part in $wanted; do [[ " $known " == *" $part "* ]] || usage; done
wanted=" ${wanted:-build $right $costs summary} "

python=${PYTHON:-python3}
# Where nvcc and compute-sanitizer are: CUDA_HOME, NVIDIA's packages, PATH, the usual folders.
tools=$PATH
for toolkit in $("$python" -c 'import glob, sys
print(*(found for path in sys.path for found in glob.glob(f"{path}/nvidia/cu*")))') \
  ${CUDA_HOME:-${CUDA_PATH:-}}; do
  tools=$toolkit/bin:$toolkit/compute-sanitizer:$tools
done
for toolkit in /usr/local/cuda /usr/local/cuda-*; do
  tools=$tools:$toolkit/bin:$toolkit/compute-sanitizer
done
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=2 PYTHONUNBUFFERED=1

is_wanted() { [[ $wanted == *" $1 "* ]]; }

# end PART RESULT SECONDS LIMIT: writes the last line of the part's log.
end() { echo "$1,$device,$2,$3,$4" | tee -a "$out/$1_$device.log"; }

# has_ended_with RESULT PART: whether a part's log says so.
has_ended_with() { tail -qn 1 "$out/$2_$device.log" 2>/dev/null | grep -q ",$1"; }

skip() {
  is_wanted "$1" || return
  : >"$out/$1_$device.log"
  end "$1" "skipped: $2" 0 0
}

# run PART LIMIT COMMAND...: runs a command for at most LIMIT seconds, unless the part is not wanted
# or has passed before.
run() {
  local part=$1 limit=$2 log=$out/$1_$device.log begin=$SECONDS status result
  shift 2
  is_wanted "$part" || return
  if [ "$part" != build ] && has_ended_with passed "$part"; then
    echo "$part: passed before"
    return
  fi
  echo "== $part: $*"
  timeout -k 10 "$limit" "$@" >"$log" 2>&1
  status=$?
  case $status in
    0) result=passed ;;
    124 | 137) result="time limit" ;;
    *) result="failed ($status)" ;;
  esac
  [ $status -eq 0 ] || tail -n 20 "$log"
  end "$part" "$result" $((SECONDS - begin)) "$limit"
}

# The test processes share the cores. Busily waiting threads would slow each other, and so would
# Inductor's compile processes, which each test process would start. Deprecation warnings come from
# newer libraries. pytest-benchmark is off because its warning, that it does not measure time in
# several processes, ends pytest.
check() {
  local part=$1 limit=$2
  shift 2
  run "$part" "$limit" env OMP_WAIT_POLICY=PASSIVE TORCHINDUCTOR_COMPILE_THREADS=1 \
    "$python" -m pytest -q -rfE -m "not release" -p no:cacheprovider -p no:benchmark \
    -W ignore::DeprecationWarning -W ignore::FutureWarning --continue-on-collection-errors "$@"
}

# bench PART LIMIT SCRIPT COMMAND OPTIONS...: runs a command of benchmarks/bench_SCRIPT.py, which may
# be "". On a CPU, where it runs next to tests, a second thread would wait for a core.
bench() {
  local part=$1 limit=$2 script=$3 command=$4 threads=()
  shift 4
  [ "$device" = cuda ] || threads=(--threads 1)
  run "$part" "$limit" "$python" "benchmarks/bench_$script.py" ${command:+"$command"} \
    --device "$device" "${threads[@]}" --out "$out/${part}_$device.csv" "$@"
}

# Without the caching allocator each tensor is a separate allocation, and the tool knows its end.
sanitize() {
  local tool=$1 limit=$2
  shift 2
  if [ -z "$sanitizer" ]; then
    skip "$tool" "no compute-sanitizer was found"
    return
  fi
  run "$tool" "$limit" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
    "$sanitizer" --tool "$tool" "$@" --error-exitcode 1 \
    "$python" -m pytest -q -p no:cacheprovider -p no:benchmark tests/ops/test_every_kernel.py
  # Some virtual machines do not let it.
  if grep -qs "Device not supported" "$out/${tool}_$device.log"; then
    end "$tool" "skipped: compute-sanitizer does not support the device" 0 "$limit"
  fi
}

if [ "$device" = cpu ]; then
  export FORCE_CPU=1
elif is_wanted build; then
  export FORCE_CUDA=1
  TORCH_CUDA_ARCH_LIST=$("$python" -c \
    'import torch; print("{}.{}".format(*torch.cuda.get_device_capability()))') || exit
  export TORCH_CUDA_ARCH_LIST
fi
# With ninja, --force recompiles only what has changed.
run build 180 "$python" setup.py build_ext --inplace --force
# Without kernels, tests are skipped and seem to pass.
"$python" -c 'import sys; from inplace_ops import _ops
sys.exit(sys.argv[1] == "cuda" and not _ops.cuda_version)' "$device" || {
  echo "the kernels are not built: name the part build"
  exit 1
}

# These files decide whether the kernels are right. The names of their tests contain the device.
decisive=(tests/{ops/test_{smooth_activations,values,every_kernel,batch_norm_ops},cuda/test_cuda}.py)
workers=()
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc) # nproc respects these variables
"$python" -c 'import xdist' 2>/dev/null && workers=(-n "$((cores < 8 ? cores : 8))")
numerics=("${workers[@]}" -k "[$device or -$device" "${decisive[@]}")
# The ignored files run nothing on a GPU, and need other libraries to import.
rest=("${decisive[@]/#/--ignore=}" --ignore-glob="*/test_"{host_kernels,engine_models,models,benchmarks}.py
  "${workers[@]}" -k "[$device or -$device or test_info.py")

# What a training step costs: `convert` next to PyTorch in place and to checkpoints.
frontier=("convert, max_ops="{1,4,8,16} "checkpoint of each block" "checkpoint of each second block")
networks=(EfficientNet-B0 ResNet-50 ConvNeXt-T ViT-S/16 "Llama blocks" "diffusion U-Net" YOLOv8n)
autocast=(--policies "CUDA autocast" --memory-format channels_last --at-once)
if [ "$device" = cuda ]; then
  sanitizer=$(PATH=$tools command -v compute-sanitizer)
  check numerics 200 "${numerics[@]}" &
  check tests 250 "${rest[@]}" &
  sanitize memcheck 200 --report-api-errors no & # PyTorch probes with calls that may fail
  sanitize initcheck 200 &
  bench batches 250 networks train "${autocast[@]}" --networks ResNet-50 ConvNeXt-T ViT-S/16 \
    --batch 8 --variants "${frontier[@]}" --largest-batch 8 &
  wait
  # Where memory is filled, --batch is the one that is verified.
  bench filled 220 networks train "${autocast[@]}" --networks "${networks[@]}" --batch 4 \
    --variants "${frontier[@]}" "convert, backward of norms apart" --fill-gib 24 --repetitions 7
  bench products 40 products ""
  bench networks 130 networks train "${autocast[@]}" --networks "${networks[@]}" --batch 8 \
    --variants "${frontier[@]}" --repetitions 21
  bench steps 40 networks steps
  bench bandwidth 50 bandwidth activations --sizes $((2 ** 28)) $((2 ** 26)) --repetitions 9
  bench norms 50 bandwidth norms --sizes $((2 ** 28)) --repetitions 9
  bench baselines 580 networks train "${autocast[@]}" --networks "${networks[@]}" --batch 4 \
    --variants "torch.compile, memory budget "0.{9,5} "convert, max_ops=4" --fill-gib 24 \
    --repetitions 7
  # Replays of CUDA graphs leave out the host's time. A checkpoint cannot be captured.
  bench graphs 200 networks train "${autocast[@]}" --networks "${networks[@]}" --batch 4 \
    --variants "convert, max_ops="{1,4,8,16} --graphs --fill-gib 6 --repetitions 15
  bench activations 180 ops time --compile --elements $((2 ** 26)) $((2 ** 16)) \
    --dtypes float32 bfloat16
  bench host 60 ops host
  bench memory 60 ops memory
  bench bytes 120 networks bytes --policies float32 "CUDA autocast" --max-ops 4
  bench tools 580 networks train --selection tools "${autocast[@]}" --repetitions 15
else # limits here only end what hangs
  check numerics 600 "${numerics[@]}"
  check tests 600 "${rest[@]}"
  for part in memcheck initcheck; do skip "$part" "it is of CUDA kernels"; done
  for part in batches graphs baselines; do skip "$part" "it needs a GPU"; done
  bench filled 300 networks train --quick --networks nnU-Net-like --batch 1 --fill-gib 0.1 \
    --variants "convert, max_ops=8" "convert, backward of norms apart" --repetitions 2
  bench products 300 products "" --bytes $((2 ** 16)) --dtypes float32 --repetitions 2
  bench networks 300 networks train --quick --networks "Llama blocks" nnU-Net-like --at-once \
    --policies float32 --variants "checkpoint of each block" "convert, max_ops=4" --repetitions 2
  bench steps 300 networks steps --repetitions 2
  bench bandwidth 300 bandwidth activations --sizes $((2 ** 16)) --repetitions 2
  bench norms 300 bandwidth norms --sizes $((2 ** 17)) --repetitions 2 \
    --layouts "NCHW, 512 x 7 x 7" "rows of 384"
  bench activations 300 ops time --elements 4096 --dtypes bfloat16 --repetitions 2 \
    --activations SiLU
  bench host 300 ops host --repetitions 2
  bench memory 300 ops memory --size 256 --activations ReLU SiLU
  bench bytes 300 networks bytes --networks "Llama blocks" --policies "CUDA autocast" --max-ops 4
  bench tools 300 networks train --selection tools --quick --networks "Llama blocks" \
    --policies float32 --repetitions 2
fi

failed=0
for part in $wanted; do
  [ "$part" = summary ] || has_ended_with passed "$part" || has_ended_with skipped "$part" || failed=1
done
is_wanted summary || exit $failed
{
  echo "# Report"
  echo
  echo '```'
  "$python" -m inplace_ops info
  echo '```'
  echo
  echo "| part | device | result | seconds | limit |"
  echo "|---|---|---|---|---|"
  for part in $known; do
    log=$out/${part}_$device.log
    [ ! -e "$log" ] || tail -n 1 "$log" | sed 's/,/ | /g; s/^/| /; s/$/ |/'
  done
  echo
  "$python" benchmarks/report.py --print "$out"
} >"$out/summary.md" 2>&1 || failed=1
echo
cat "$out/summary.md"
exit $failed
