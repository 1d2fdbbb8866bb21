// Errors of the package's own checks.
#pragma once

#include <sstream>
#include <stdexcept>

namespace inplace_ops {

// Throws an error with a message of these parts unless a condition holds. STD_TORCH_CHECK would
// begin the message with the names of the function and of the source file, which say nothing to
// the user.
template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

}  // namespace inplace_ops
