#include "../registration.h"
#include "block_loop.h"

STABLE_TORCH_LIBRARY_IMPL(inplace_ops, CPU, m) {
  inplace_ops::register_all_double_backward<inplace_ops::Cpu>(m);
}
