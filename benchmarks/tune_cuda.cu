// Times the CUDA kernels with every grid and block size below, alternating with a copy between
// tensors of the same size. tune_cuda.py compiles this file for each choice of accesses and cache
// hints. Prints CSV. Needs no torch.
//
// Each kernel is verified before it is timed, against formulas in this file. A kernel that fails is
// reported and has no row, and the exit status is 1. Each launch of a timing has its own tensors,
// together larger than any L2 cache, and a graph of all launches is replayed, so that only the
// device is timed.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "../csrc/activations.h"
#include "../csrc/cuda/elementwise.cuh"
#include "../csrc/cuda/path_choice.cuh"

#define CHECK(call) check(call, #call, __LINE__)

namespace {

using namespace inplace_ops;

constexpr int64_t kMib = 1 << 20;
constexpr int64_t kSizes[] = {kMib, 64 * kMib, 1024 * kMib};  // bytes of a tensor
constexpr int64_t kRotated = 1024 * kMib;                     // the same over all launches, at most
constexpr int64_t kMostLaunches = 512;
constexpr int kWarmUps = 1, kRepetitions = 9;

struct Grid {
  const char* name;
  bool strides;  // a grid-stride loop with as many blocks as are resident, or one tile a warp
  int threads;
};
constexpr Grid kGrids[] = {{"simple", false, 32},  {"simple", false, 64},  {"simple", false, 128},
                           {"simple", false, 256}, {"simple", false, 512}, {"stride", true, 128},
                           {"stride", true, 256},  {"stride", true, 512}};

cudaDeviceProp device;
cudaStream_t stream;
struct {
  void *input, *x, *grad, *result, *bits;
} memory;
struct Wrong {
  unsigned long long elements;
  float largest;  // distance from the expected value
};
__device__ Wrong wrong;
bool failed = false;

void check(cudaError_t error, const char* call, int line) {
  if (error == cudaSuccess) return;
  fprintf(stderr, "tune_cuda.cu:%d: %s: %s\n", line, call, cudaGetErrorString(error));
  exit(1);
}

// A standard normal value for each i: Box and Muller's transform of a hash (splitmix64).
__device__ float normal(uint64_t i) {
  uint64_t hash = (i + 1) * 0x9e3779b97f4a7c15ull;
  hash = (hash ^ (hash >> 30)) * 0xbf58476d1ce4e5b9ull;
  hash = (hash ^ (hash >> 27)) * 0x94d049bb133111ebull;
  hash ^= hash >> 31;
  const float u = (float(hash >> 40) + 1.0f) * 0x1p-24f, v = float(hash & 0xffffffu) * 0x1p-23f;
  return sqrtf(-2.0f * logf(u)) * cospif(v);
}

template <class T>
__global__ void fill(T* values, int64_t elements, uint64_t seed) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step)
    values[i] = store<T>(normal(seed + i));
}

// The expected results and their tolerances: in units in the last place, absolute for subnormal
// results, and of the derivative where the kernel computes it from the output and the saved bits.
struct CopyReference {
  static constexpr float kUlps = 0, kAbsolute = 0;
  __device__ static float value(float x) { return x; }
};
struct ReluReference {
  static constexpr float kUlps = 0, kAbsolute = 0, kDerivative = 0;
  __device__ static float value(float x) { return x > 0 ? x : 0; }
  __device__ static float derivative(float x) { return x > 0; }
};
struct SiluReference {
  static constexpr float kUlps = 2, kAbsolute = 6e-8f, kDerivative = 2e-5f;
  __device__ static float value(float x) { return x / (1 + expf(-x)); }
  __device__ static float derivative(float x) {
    const float sigmoid = 1 / (1 + expf(-x));
    return sigmoid * (1 + x * (1 - sigmoid));
  }
};

template <class T>
constexpr float kUlp = sizeof(T) == 4            ? 0x1p-23f
                       : std::is_same_v<T, Half> ? 0x1p-10f
                                                 : 0x1p-7f;

template <class Reference, bool is_gradient, class T>
__global__ void count_wrong(const T* inputs, const T* grads, const T* results, int64_t elements) {
  const int64_t step = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step) {
    const float x = load(inputs[i]);
    float expected, tolerance = Reference::kAbsolute;
    if constexpr (is_gradient) {
      const float grad = load(grads[i]);
      expected = grad * Reference::derivative(x);
      tolerance += fabsf(grad) * Reference::kDerivative;
    } else {
      expected = Reference::value(x);
    }
    tolerance += fabsf(expected) * kUlp<T> * Reference::kUlps;
    const float distance = fabsf(load(results[i]) - expected);
    if (distance <= tolerance) continue;
    atomicAdd(&wrong.elements, 1ull);
    // distance >= 0, so its pattern, taken as an integer, has the order of the floats.
    atomicMax(reinterpret_cast<int*>(&wrong.largest), __float_as_int(distance));
  }
}

template <class Reference, bool is_gradient, class T>
bool verify(const char* what, const char* dtype, const Grid& grid, const void* result,
            int64_t elements) {
  Wrong found{};
  CHECK(cudaMemcpyToSymbolAsync(wrong, &found, sizeof(found), 0, cudaMemcpyHostToDevice, stream));
  count_wrong<Reference, is_gradient><<<4096, 256, 0, stream>>>(
      static_cast<const T*>(memory.input), static_cast<const T*>(memory.grad),
      static_cast<const T*>(result), elements);
  CHECK(cudaGetLastError());
  CHECK(cudaMemcpyFromSymbolAsync(&found, wrong, sizeof(found), 0, cudaMemcpyDeviceToHost, stream));
  CHECK(cudaStreamSynchronize(stream));
  if (found.elements == 0) return true;
  fprintf(
      stderr,
      "FAILED, not timed: %s, %s, %s, %s grid of %d threads: %llu of %lld elements are wrong, by "
      "up to %g\n",
      what, is_gradient ? "backward" : "forward", dtype, grid.name, grid.threads, found.elements,
      static_cast<long long>(elements), found.largest);
  failed = true;
  return false;
}

template <int threads, bool strides, int count, class Functor>
__global__ void __launch_bounds__(threads)
    run_warps(const Functor functor, const Operands<Functor> operands, int64_t elements) {
  constexpr int warps = threads / kWarpSize;
  int64_t tile = int64_t(blockIdx.x) * warps + threadIdx.x / kWarpSize;
  if constexpr (strides) {
    for (; tile * kTileElements<count> < elements; tile += int64_t(gridDim.x) * warps)
      run_warp<count>(functor, Dense{}, operands, 0, elements, tile);
  } else {
    run_warp<count>(functor, Dense{}, operands, 0, elements, tile);
  }
}

template <int threads, class Functor>
auto function_of(bool strides) {
  constexpr int count = kVectorElements<typename Functor::Scalar>;
  return strides ? run_warps<threads, true, count, Functor>
                 : run_warps<threads, false, count, Functor>;
}

template <class Functor>
auto function_of(const Grid& grid) {
  if (grid.threads == 32) return function_of<32, Functor>(grid.strides);
  if (grid.threads == 64) return function_of<64, Functor>(grid.strides);
  if (grid.threads == 128) return function_of<128, Functor>(grid.strides);
  if (grid.threads == 256) return function_of<256, Functor>(grid.strides);
  return function_of<512, Functor>(grid.strides);
}

template <class Functor>
void launch(const Operands<Functor>& operands, int64_t elements, const Grid& grid) {
  constexpr int count = kVectorElements<typename Functor::Scalar>;
  const auto run = function_of<Functor>(grid);
  const int warps = grid.threads / kWarpSize;
  int64_t blocks = (tiles_of<count>(elements) + warps - 1) / warps;
  if (grid.strides) {
    int resident = 0;
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, run, grid.threads, 0));
    blocks = std::min<int64_t>(blocks, resident * device.multiProcessorCount);
  }
  run<<<dim3(blocks), grid.threads, 0, stream>>>(Functor{}, operands, elements);
  CHECK(cudaGetLastError());
}

template <class Enqueue>
cudaGraphExec_t record(const Enqueue& enqueue) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  enqueue();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&replay, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  return replay;
}

// Verifies and times forward and backward of an activation at one size, in all grids.
template <class Forward, class Backward, class Reference, int planes>
class Comparison {
 public:
  using T = typename Forward::Scalar;

  Comparison(const char* activation, const char* dtype, int64_t size)
      : activation_(activation), dtype_(dtype), size_(size) {
    copy_input_ = record([&] { copy(memory.x, memory.input); });
    copy_grad_ = record([&] { copy(memory.result, memory.grad); });
    for (const Grid& grid : kGrids) {
      forwards_.push_back(record([&] { forward(grid); }));
      backwards_.push_back(record([&] { backward(grid); }));
    }
  }

  ~Comparison() {
    for (const auto& graphs : {forwards_, backwards_, {copy_input_, copy_grad_}})
      for (cudaGraphExec_t graph : graphs) CHECK(cudaGraphExecDestroy(graph));
  }

  void run() const {
    const int64_t all = elements_ * launches_;
    fill<<<4096, 256, 0, stream>>>(static_cast<T*>(memory.input), all, 0);
    fill<<<4096, 256, 0, stream>>>(static_cast<T*>(memory.grad), all, all);
    CHECK(cudaGetLastError());
    std::vector<bool> forward_right, backward_right;
    for (size_t i = 0; i < forwards_.size(); ++i) {
      CHECK(cudaMemsetAsync(memory.bits, 0xff, all * planes / kGroup, stream));
      CHECK(cudaMemsetAsync(memory.result, 0xff, all * sizeof(T), stream));  // NaN
      CHECK(cudaGraphLaunch(copy_input_, stream));
      const bool copied = verify<CopyReference, false, T>("copy", dtype_, kGrids[i], memory.x, all);
      CHECK(cudaGraphLaunch(forwards_[i], stream));
      forward_right.push_back(
          copied && verify<Reference, false, T>(activation_, dtype_, kGrids[i], memory.x, all));
      CHECK(cudaGraphLaunch(backwards_[i], stream));
      backward_right.push_back(
          copied && verify<Reference, true, T>(activation_, dtype_, kGrids[i], memory.result, all));
    }
    time<Backward>("backward", backwards_, copy_grad_, backward_right);  // x is still the output
    time<Forward>("forward", forwards_, copy_input_, forward_right);
  }

 private:
  void copy(void* to, const void* from) const {
    for (int64_t i = 0; i < launches_; ++i) {
      CHECK(cudaMemcpyAsync(static_cast<char*>(to) + i * size_,
                            static_cast<const char*>(from) + i * size_, size_,
                            cudaMemcpyDeviceToDevice, stream));
    }
  }

  PackedBits<uint8_t> bits(int64_t i) const {
    const int64_t plane = plane_bytes(elements_);
    return {static_cast<uint8_t*>(memory.bits) + i * plane * planes, plane, planes};
  }

  void forward(const Grid& grid) const {
    for (int64_t i = 0; i < launches_; ++i) {
      T* x = static_cast<T*>(memory.x) + i * elements_;
      launch(Operands<Forward>{x, {x}, bits(i)}, elements_, grid);
    }
  }

  void backward(const Grid& grid) const {
    for (int64_t i = 0; i < launches_; ++i) {
      const int64_t first = i * elements_;
      Operands<Backward> operands{static_cast<T*>(memory.result) + first,
                                  {static_cast<const T*>(memory.grad) + first},
                                  {bits(i).data, bits(i).plane_stride, planes}};
      if constexpr (Backward::kInputs == 2)
        operands.in[1] = static_cast<const T*>(memory.x) + first;
      launch(operands, elements_, grid);
    }
  }

  // Times the graphs in turn, each after the copy, which also restores the tensor that the kernel
  // overwrites.
  template <class Functor>
  void time(const char* direction, const std::vector<cudaGraphExec_t>& runs, cudaGraphExec_t copy,
            const std::vector<bool>& right) const {
    struct Events {
      cudaEvent_t begin, between, end;
    };
    std::vector<Events> all(runs.size() * (kWarmUps + kRepetitions));
    for (size_t i = 0; i < all.size(); ++i) {
      for (cudaEvent_t* event : {&all[i].begin, &all[i].between, &all[i].end})
        CHECK(cudaEventCreate(event));
      CHECK(cudaEventRecord(all[i].begin, stream));
      CHECK(cudaGraphLaunch(copy, stream));
      CHECK(cudaEventRecord(all[i].between, stream));
      CHECK(cudaGraphLaunch(runs[i % runs.size()], stream));
      CHECK(cudaEventRecord(all[i].end, stream));
    }
    CHECK(cudaStreamSynchronize(stream));

    const double moved = double(Functor::kInputs + 1) * size_ + double(elements_) * planes / 8;
    for (size_t grid = 0; grid < runs.size(); ++grid) {
      if (!right[grid]) continue;
      std::vector<double> times, copies, shares;  // times in us per launch
      for (size_t i = grid + kWarmUps * runs.size(); i < all.size(); i += runs.size()) {
        float copied, ran;
        CHECK(cudaEventElapsedTime(&copied, all[i].begin, all[i].between));
        CHECK(cudaEventElapsedTime(&ran, all[i].between, all[i].end));
        copies.push_back(copied * 1e3 / launches_);
        times.push_back(ran * 1e3 / launches_);
        shares.push_back(moved / (2.0 * size_) * copied / ran);
      }
      for (auto* values : {&times, &copies, &shares}) std::sort(values->begin(), values->end());
      cudaFuncAttributes attributes;
      CHECK(cudaFuncGetAttributes(&attributes, function_of<Functor>(kGrids[grid])));
      constexpr int half = kRepetitions / 2, quarter = kRepetitions / 4;
      printf("%s,%s,%s,%s,%lld,%s,%d,%d,%lld,%.3f,%.2f,%.2f,%.3f,%.3f,%.3f\n", device.name,
             activation_, direction, dtype_, static_cast<long long>(size_), kGrids[grid].name,
             kGrids[grid].threads, attributes.numRegs, static_cast<long long>(launches_),
             times[half], moved / times[half] / 1e3, 2.0 * size_ / copies[half] / 1e3, shares[half],
             shares[quarter], shares[kRepetitions - 1 - quarter]);
    }
    for (const Events& events : all) {
      for (cudaEvent_t event : {events.begin, events.between, events.end})
        CHECK(cudaEventDestroy(event));
    }
  }

  const char *activation_, *dtype_;
  const int64_t size_;
  const int64_t elements_ = size_ / sizeof(T);
  const int64_t launches_ = std::min(kMostLaunches, kRotated / size_);
  cudaGraphExec_t copy_input_, copy_grad_;
  std::vector<cudaGraphExec_t> forwards_, backwards_;
};

template <class T>
void compare(const char* dtype) {
  for (const int64_t size : kSizes) {
    Comparison<ForwardMask<ReLU<T>>, BackwardMask<ReLU<T>>, ReluReference, 1>("ReLU", dtype, size)
        .run();
    Comparison<ForwardOutput<SiLU<T>>, BackwardOutput<SiLU<T>>, SiluReference,
               SiLU<T>::kDefaultBits>("SiLU", dtype, size)
        .run();
  }
}

}  // namespace

int main() {
  CHECK(cudaGetDeviceProperties(&device, 0));
  CHECK(cudaStreamCreate(&stream));
  for (void** tensor : {&memory.input, &memory.x, &memory.grad, &memory.result, &memory.bits})
    CHECK(cudaMalloc(tensor, kRotated));
  printf(
      "device,activation,direction,dtype,bytes,grid,threads,registers,launches,median_us,"
      "gigabytes_per_second,copy_gigabytes_per_second,share_of_copy,share_first_quartile,"
      "share_third_quartile\n");
  // Pairs of accesses share the bytes of a 32-bit format's packed bits.
  if constexpr (kAccesses % 2 == 0) compare<float>("float32");
  compare<BFloat16>("bfloat16");
  compare<Half>("float16");
  return failed;
}
