// Apart from the other directions, so that all are compiled at once: they take long.
#include "../registration.h"
#include "elementwise.h"

STABLE_TORCH_LIBRARY_IMPL(inplace_ops, CPU, m) {
  inplace_ops::register_all_forward<inplace_ops::Cpu>(m);
}
