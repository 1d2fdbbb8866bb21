// One file per direction, so that they compile in parallel: each takes long.
#include "../registration.h"
#include "block_loop.h"

STABLE_TORCH_LIBRARY_IMPL(inplace_ops, CPU, m) {
  inplace_ops::register_all_forward<inplace_ops::Cpu>(m);
}
