// Dispatches from a runtime dtype to a storage format. by_dtype() in library.cpp lists the same
// dtypes for Python.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include "dtypes.h"
#include "errors.h"

namespace inplace_ops {

// Calls body(T{}), where T is the storage format of the dtype.
template <class Body>
void dispatch(torch::headeronly::ScalarType dtype, const char* op, const Body& body) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::Double:
      return body(double{});
    case ScalarType::Float:
      return body(float{});
    case ScalarType::Half:
      return body(Half{});
    case ScalarType::BFloat16:
      return body(BFloat16{});
    default:
      break;
  }
  check(false, op, "_: unsupported dtype ", torch::headeronly::toString(dtype),
        "; supported are float64, float32, float16, bfloat16");
}

}  // namespace inplace_ops
