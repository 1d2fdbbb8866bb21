// Runs the bodies of the CUDA kernels on the host, over a virtual grid, for tests: conftest.py
// compiles this file, and test_host_kernels.py calls it with the addresses of tensors. Needs
// neither torch nor a GPU. With INPLACE_OPS_RECORD nothing runs: the launches are recorded, for
// tests that execute the compiled kernels.
#define INPLACE_OPS_HARDWARE "../tests/cuda/emulated_hardware.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cfenv>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <cxxabi.h>

#include "../../csrc/cuda/batch_norm.cuh"
#include "../../csrc/cuda/elementwise.cuh"
#include "../../csrc/cuda/path_choice.cuh"
#include "named_activation.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) (void(address), void(size))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (void(address), void(size))
#endif

namespace py = pybind11;
using namespace inplace_ops;

// One launch: the operands' addresses, output first, and their strides in elements.
struct Launch {
  std::vector<uintptr_t> addresses;
  uintptr_t packed_address;
  int64_t plane_stride;
  int planes;
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> strides;
  // Where the grid begins. A test of elements past 2^31 needs no memory for those before.
  int64_t first_element;
  // A norm's affine: scale and shift of the channels, then rstd and mean of the rows, if any, and
  // the strides of channels and of rows.
  std::vector<uintptr_t> affine_addresses;
  std::vector<std::vector<int64_t>> affine_strides;
};

// Builds a NormAffine as affine_of() in csrc/tensors.h does from tensors.
template <class C>
NormAffine<C> affine_of(const Launch& launch) {
  StridedLayout strided(2);
  for (size_t d = 0; d < launch.sizes.size(); ++d) {
    int64_t strides[kMaxOperands] = {};
    for (size_t k = 0; k < launch.affine_strides.size(); ++k)
      strides[k] = launch.affine_strides[k][d];
    strided.add_inner_dim(launch.sizes[d], strides);
  }
  if (strided.dims > kMaxAffineDims) throw std::invalid_argument("too many dimensions: affine");
  NormAffine<C> affine{};
  affine.strided.dims = strided.dims;
  affine.strided.operands = 2;
  affine.strided.elements = strided.elements;
  for (int d = 0; d < strided.dims; ++d) {
    affine.strided.sizes[d] = strided.sizes[d];
    for (int k = 0; k < 2; ++k) affine.strided.strides[k][d] = strided.strides[k][d];
  }
  const auto pointer = [&](size_t k) {
    return reinterpret_cast<const C*>(launch.affine_addresses[k]);
  };
  affine.channel_affine = {pointer(0), pointer(1)};
  if (launch.affine_strides.size() > 1) affine.row_statistics = {pointer(2), pointer(3)};
  return affine;
}

struct Path {
  int access = 0;      // elements of an access, except in the rest at the end
  std::string layout;  // of a norm's affine, for accesses of several elements
};

std::string name_of(const AffineLayout& layout) {
  const char* const names[] = {"planes", "split planes", "channels last"};
  return std::string(names[layout.kind]) + (layout.is_strided ? ", strided" : "");
}

// Returns the name of a kernel with its template arguments, such as "run_warps<4, Functor,
// Layout>", from a mangled name.
std::string kernel_name(const std::string& mangled) {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  if (!demangled) throw std::invalid_argument("not a mangled name: " + mangled);
  const std::string name = demangled;
  free(demangled);
  size_t end = name.find('<', name.find("_warps"));
  if (end == std::string::npos) throw std::invalid_argument("not a kernel of warps: " + name);
  const size_t begin = name.find_last_of(": ", end) + 1;  // after the scope, if any
  for (int depth = 0; end < name.size(); ++end) {
    depth += (name[end] == '<') - (name[end] == '>');
    if (depth == 0) break;
  }
  return name.substr(begin, end + 1 - begin);
}

// A launch of a kernel in kernels.cu, for the warps that have something to do.
struct Recorded {
  std::string kernel;
  std::vector<std::string> parameters;  // the bytes of each
  int64_t first_warp, last_warp;
  int warps_of_a_block;
};
std::vector<Recorded> recorded;

template <int count, class Functor, class Layout>
struct run_warps {};
template <int count, class Functor>
struct sum_warps {};
template <int count, class Functor>
struct correct_warps {};
template <class C>
struct finish_warps {};

template <class Kernel, class... Parameters>
void record(int64_t first_warp, int64_t last_warp, int warps_of_a_block,
            const Parameters&... parameters) {
  const auto bytes = [](const auto& parameter) {
    return std::string(reinterpret_cast<const char*>(&parameter), sizeof(parameter));
  };
  recorded.push_back({kernel_name(typeid(Kernel).name()),
                      {bytes(parameters)...},
                      first_warp,
                      last_warp,
                      warps_of_a_block});
}

// The warps of a grid for `count` of them: those of whole blocks.
constexpr int kWarpsOfBlock = kThreads / kWarpSize;
int64_t warps_of_grid(int64_t count) {
  return (count + kWarpsOfBlock - 1) / kWarpsOfBlock * kWarpsOfBlock;
}

template <class Functor>
Path run(const Functor& functor, const Launch& launch) {
  using T = typename Functor::Scalar;
  using Out = typename Functor::Out;
  if (launch.addresses.size() != Functor::kInputs + 1)
    throw std::invalid_argument("wrong number of operands");
  StridedLayout strided(Functor::kInputs + 1);
  for (size_t d = 0; d < launch.sizes.size(); ++d) {
    int64_t strides[kMaxOperands] = {};
    for (int k = 0; k <= Functor::kInputs; ++k) strides[k] = launch.strides[k][d];
    strided.add_inner_dim(launch.sizes[d], strides);
  }
  Operands<Functor> operands{};
  operands.out = reinterpret_cast<Out*>(launch.addresses[0]);
  for (int k = 0; k < Functor::kInputs; ++k)
    operands.in[k] = reinterpret_cast<const typename Functor::In*>(launch.addresses[k + 1]);
  operands.packed.data = reinterpret_cast<decltype(operands.packed.data)>(launch.packed_address);
  operands.packed.plane_stride = launch.plane_stride;
  operands.packed.planes = launch.planes;
  if constexpr (Functor::kNormalizes) operands.affine = affine_of<opmath_t<T>>(launch);

  Path path;
  const int64_t few_tiles = 1;  // small tensors take both paths
  const auto launch_tiles = [&](auto count, const auto& layout, int64_t begin, int64_t end) {
    path.access = std::max(path.access, count());
    if constexpr (std::is_same_v<std::decay_t<decltype(layout)>, RowsOfNormalized>)
      path.layout = name_of(layout.affine);
    const int64_t skipped = std::max<int64_t>(launch.first_element - begin, 0);
    const int64_t tiles = tiles_of<count()>(end - begin);
    const int64_t first = skipped / kTileElements<count()>;
    const int64_t last = warps_of_grid(tiles);
#ifdef INPLACE_OPS_RECORD
    using Layout = std::decay_t<decltype(layout)>;
    record<run_warps<count(), Functor, Layout>>(first, last, kWarpsOfBlock, functor, layout,
                                                operands, begin, end);
#else
    for (int64_t tile = first; tile < last; ++tile)
      run_warp<count()>(functor, layout, operands, begin, end, tile);
#endif
  };
  choose_path(strided, operands, launch_tiles, few_tiles);
  return path;
}

// Runs the functor make(T{}) if the requested name is its name. Runs make(Format{}) if it names a
// cast of the results, as "Normalize to float16" does, or of inputs and results, as "Normalize from
// float16" does.
template <class T, class MakeFunctor>
std::optional<Path> run_if_named(const std::string& name, const std::string& requested,
                                 const MakeFunctor& make, const Launch& launch) {
  if (requested == name) return run(make(T{}), launch);
  std::optional<Path> path;
  if constexpr (std::is_same_v<T, float>) {
    const auto run_casting = [&](auto format, const std::string& dtype) {
      const auto functor = make(format);
      using Functor = std::remove_const_t<decltype(functor)>;
      using Format = decltype(format);
      if (requested == name + " to " + dtype) path = run(Cast<Functor, Format>{functor}, launch);
      if (requested == name + " from " + dtype)
        path = run(InFloat32<Functor, Format>{{functor}}, launch);
    };
    run_casting(Half{}, "float16");
#ifndef __SANITIZE_ADDRESS__
    run_casting(BFloat16{}, "bfloat16");
#endif
  }
  return path;
}

// Returns the functor of a recompute whose results have the format Out.
template <class Out, template <class> class Activation, class T>
auto recompute_of(const Activation<T>& activation) {
  using A = ActivationFor<Activation, T, Out>;
  if constexpr (std::is_same_v<A, Activation<T>>)
    return ForwardRecompute<A, T>{{{{}, activation}}};
  else
    return ForwardRecompute<A, T>{};
}

template <class A>
Path run_functor(const std::string& functor, const A& activation, const Launch& launch) {
  using T = typename A::Scalar;
  const auto normalize = [](auto) { return Normalize<T>{}; };
  const auto recompute = [&](auto out) { return recompute_of<decltype(out)>(activation); };
  if (const auto path = run_if_named<T>("Normalize", functor, normalize, launch)) return *path;
  if (const auto path = run_if_named<T>("ForwardRecompute", functor, recompute, launch))
    return *path;
  if (functor == "BackwardRecompute") return run(BackwardRecompute<A>{{{{}, activation}}}, launch);
  if (functor == "Identity") return run(Identity<T>{}, launch);
  if (functor == "NormalizeAdd") return run(NormalizeAdd<T>{}, launch);
  if constexpr (A::kKind == Kind::kPiecewiseLinear) {
    if (functor == "ForwardRecomputeAdd")
      return run(ForwardRecomputeAdd<A>{{{{}, {{}, activation}}}}, launch);
    if (functor == "ForwardMask") return run(ForwardMask<A>{{}, activation}, launch);
    if (functor == "BackwardMask") return run(BackwardMask<A>{{}, activation}, launch);
    if (functor == "BackwardMaskOfOutput")
      return run(BackwardMaskOfOutput<A>{{}, activation}, launch);
  } else {
    if (functor == "ForwardOutput") return run(ForwardOutput<A>{{}, activation}, launch);
    if (functor == "BackwardOutput") return run(BackwardOutput<A>{}, launch);
    if (functor == "DoubleBackward") return run(DoubleBackward<A>{}, launch);
    if (functor == "ForwardDerivative") return run(ForwardDerivative<A>{{}, activation}, launch);
    if (functor == "BackwardDerivative") {
      const auto grid = DerivativeGrid<opmath_t<T>>::template for_activation<A>(launch.planes);
      return run(BackwardDerivative<T>{{}, grid}, launch);
    }
  }
  throw std::invalid_argument("unknown functor: " + functor);
}

std::pair<int, std::string> run_named(
    const std::string& activation, const std::vector<double>& scalars, const std::string& functor,
    const std::string& dtype, std::vector<uintptr_t> addresses, uintptr_t packed_address,
    int64_t plane_stride, int planes, std::vector<int64_t> sizes,
    std::vector<std::vector<int64_t>> strides, int64_t first_element,
    std::vector<uintptr_t> affine_addresses, std::vector<std::vector<int64_t>> affine_strides) {
  const Launch launch{addresses, packed_address, plane_stride,     planes,        sizes,
                      strides,   first_element,  affine_addresses, affine_strides};
  Path path;
  with_activation(activation, dtype, scalars,
                  [&](const auto& typed) { path = run_functor(functor, typed, launch); });
  return {path.access, path.layout};
}

// Runs the kernels that Cuda::backward_batch_norm() launches, and returns the elements of an
// access.
template <class A>
int run_passes(const A& activation, const std::vector<uintptr_t>& addresses,
               const ChannelLayout& layout, int64_t pieces) {
  using Functor = BackwardRecompute<A>;
  using T = typename A::Scalar;
  using C = opmath_t<T>;
  const Functor functor{{{{}, activation}}};
  const auto numbers = [&](int k) { return reinterpret_cast<C*>(addresses.at(k)); };
  const auto elements = [&](int k) { return reinterpret_cast<T*>(addresses.at(k)); };
  Operands<Functor> operands{};
  operands.out = elements(0);
  operands.in[0] = elements(1);
  operands.in[1] = elements(2);
  operands.affine.channel_affine = {numbers(3), numbers(4)};
  const BatchNormBackward<C> norm{layout,     numbers(5),  numbers(6),  numbers(7), numbers(8),
                                  numbers(9), numbers(10), numbers(11), pieces};
  int access = 0;
  choose_access(layout, operands, [&](auto count) {
    access = count();
    const ChannelLoop sums = summing_loop(layout, count(), pieces);
    const ChannelLoop corrections = correcting_loop(layout, count());
    const int64_t last_sum = warps_of_grid(sums.warps());
    const int64_t last_correction = warps_of_grid(corrections.warps());
#ifdef INPLACE_OPS_RECORD
    record<sum_warps<count(), Functor>>(0, last_sum, kWarpsOfBlock, functor, sums, operands, norm);
    record<finish_warps<C>>(0, layout.channels, 1, norm);
    record<correct_warps<count(), Functor>>(0, last_correction, kWarpsOfBlock, functor, corrections,
                                            operands, norm);
#else
    for (int64_t warp = 0; warp < last_sum; ++warp)
      sum_warp<count()>(functor, sums, operands, norm, warp);
    for (int64_t channel = 0; channel < layout.channels; ++channel) finish_warp(norm, channel);
    for (int64_t warp = 0; warp < last_correction; ++warp)
      correct_warp<count()>(functor, corrections, operands, norm, warp);
#endif
  });
  return access;
}

// The addresses are those of grad_x, the gradient, x, scale, shift, mean, rstd, slope, offset,
// grad_weight, grad_bias and the partial sums; the layout has the members of a ChannelLayout.
int run_batch_norm(const std::string& activation, const std::vector<double>& scalars,
                   const std::string& dtype, const std::vector<uintptr_t>& addresses,
                   const std::array<int64_t, 4>& layout, int64_t pieces) {
  int access = 0;
  with_activation(activation, dtype, scalars, [&](const auto& typed) {
    access = run_passes(typed, addresses, {layout[0], layout[1], layout[2], layout[3]}, pieces);
  });
  return access;
}

int64_t pieces_of(const std::array<int64_t, 4>& layout, int64_t element_bytes) {
  return pieces_of_layout({layout[0], layout[1], layout[2], layout[3]}, element_bytes);
}

// Returns the offsets of a lane's first accesses in x and in the gradient, and the warps of the
// loop.
std::pair<std::vector<std::pair<int64_t, int64_t>>, int64_t> offsets_of_lane(
    const std::array<int64_t, 4>& layout, int count, int64_t pieces, int64_t warp, unsigned lane,
    int64_t most) {
  const ChannelLoop loop =
      summing_loop({layout[0], layout[1], layout[2], layout[3]}, count, pieces);
  std::vector<std::pair<int64_t, int64_t>> offsets;
  for (auto at = loop.start(warp, lane); at.remaining > 0 && most > 0; --at.remaining, --most) {
    offsets.emplace_back(at.offsets.dense, at.offsets.grad);
    loop.advance(at);
  }
  return {offsets, loop.warps()};
}

// Returns the quotients and the remainders of the numbers.
std::pair<std::vector<int64_t>, std::vector<int64_t>> divide(const std::vector<int64_t>& numbers,
                                                             int64_t divisor) {
  const IntDivider divider(divisor);
  std::pair<std::vector<int64_t>, std::vector<int64_t>> results;
  for (const int64_t number : numbers) {
    results.first.push_back(divider.div(uint32_t(number)));
    results.second.push_back(divider.mod(uint32_t(number)));
  }
  return results;
}

// Computes x * y + z in each element, rounded once: to nearest, or down.
template <class C>
void fma(uintptr_t x, uintptr_t y, uintptr_t z, uintptr_t result, size_t count, bool rounds_down) {
  const auto in = [](uintptr_t address) { return reinterpret_cast<const C*>(address); };
  std::fesetround(rounds_down ? FE_DOWNWARD : FE_TONEAREST);
  for (size_t i = 0; i < count; ++i)
    reinterpret_cast<C*>(result)[i] = std::fma(in(x)[i], in(y)[i], in(z)[i]);
  std::fesetround(FE_TONEAREST);
}

void poison(uintptr_t address, size_t size) {
  ASAN_POISON_MEMORY_REGION(reinterpret_cast<void*>(address), size);
}

void unpoison(uintptr_t address, size_t size) {
  ASAN_UNPOISON_MEMORY_REGION(reinterpret_cast<void*>(address), size);
}

PYBIND11_MODULE(MODULE_NAME, module) {
  module.def("run", &run_named);
  module.def("divide", &divide);
  module.def("run_batch_norm", &run_batch_norm);
  module.def("pieces_of", &pieces_of);
  module.def("offsets_of_lane", &offsets_of_lane);
  module.def("kernel_name", &kernel_name);
  module.def("fma_float", &fma<float>);
  module.def("fma_double", &fma<double>);
  module.def("recorded", [] { return std::exchange(recorded, {}); });
  py::class_<Recorded>(module, "Recorded", py::module_local())  // several modules are imported
      .def_readonly("kernel", &Recorded::kernel)
      .def_property_readonly("parameters",
                             [](const Recorded& launch) {
                               return std::vector<py::bytes>(launch.parameters.begin(),
                                                             launch.parameters.end());
                             })
      .def_readonly("first_warp", &Recorded::first_warp)
      .def_readonly("last_warp", &Recorded::last_warp)
      .def_readonly("warps_of_a_block", &Recorded::warps_of_a_block);
  module.def("poison", &poison);
  module.def("unpoison", &unpoison);
  py::dict tile;  // from the bytes of an element to the elements of a warp's tile
  tile[py::int_(sizeof(double))] = kTileElements<kVectorElements<double>>;
  tile[py::int_(sizeof(float))] = kTileElements<kVectorElements<float>>;
  tile[py::int_(sizeof(Half))] = kTileElements<kVectorElements<Half>>;
  module.attr("tile") = tile;
}
