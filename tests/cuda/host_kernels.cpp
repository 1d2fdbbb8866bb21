// Runs the bodies of the CUDA kernels on the host, over a virtual grid, for tests: conftest.py
// compiles this file, and test_host_kernels.py calls it with the addresses of tensors. Needs
// neither torch nor a GPU. With INPLACE_OPS_RECORD nothing runs: run() records the launches, for
// tests that execute the compiled kernels.
#define INPLACE_OPS_HARDWARE "../tests/cuda/emulated_hardware.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

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

// Returns the template arguments in a mangled name, such as "<4, Functor, Layout>".
std::string template_arguments(const std::string& mangled) {
  int status = 0;
  char* const demangled = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  if (!demangled) throw std::invalid_argument("not a mangled name: " + mangled);
  const std::string name = demangled;
  free(demangled);
  const size_t begin = name.find('<', name.find("run_warps"));
  size_t end = begin;
  for (int depth = 0; end < name.size(); ++end) {
    depth += (name[end] == '<') - (name[end] == '>');
    if (depth == 0) break;
  }
  return name.substr(begin, end + 1 - begin);
}

// A launch of the kernel run_warps() in kernels.cu, for the warps that have tiles.
struct Recorded {
  std::string template_arguments;
  std::vector<std::string> parameters;  // the bytes of each
  int64_t first_warp, last_warp;
  int warps_of_a_block;
};
std::vector<Recorded> recorded;

template <int count, class Functor, class Layout>
struct run_warps {};

template <int count, class Functor, class Layout>
void record(const Functor& functor, const Layout& layout, const Operands<Functor>& operands,
            int64_t begin, int64_t end, int64_t first_warp, int64_t last_warp) {
  const auto bytes = [](const auto& parameter) {
    return std::string(reinterpret_cast<const char*>(&parameter), sizeof(parameter));
  };
  recorded.push_back({template_arguments(typeid(run_warps<count, Functor, Layout>).name()),
                      {bytes(functor), bytes(layout), bytes(operands), bytes(begin), bytes(end)},
                      first_warp,
                      last_warp,
                      kThreads / kWarpSize});
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
    constexpr int warps = kThreads / kWarpSize;
    const int64_t skipped = std::max<int64_t>(launch.first_element - begin, 0);
    const int64_t tiles = tiles_of<count()>(end - begin);
    const int64_t first = skipped / kTileElements<count()>;
    const int64_t last = (tiles + warps - 1) / warps * warps;
#ifdef INPLACE_OPS_RECORD
    record<count()>(functor, layout, operands, begin, end, first, last);
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
    run_casting(BFloat16{}, "bfloat16");
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
  module.def("template_arguments", &template_arguments);
  module.def("fma_float", &fma<float>);
  module.def("fma_double", &fma<double>);
  module.def("recorded", [] { return std::exchange(recorded, {}); });
  py::class_<Recorded>(module, "Recorded", py::module_local())  // several modules are imported
      .def_readonly("template_arguments", &Recorded::template_arguments)
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
