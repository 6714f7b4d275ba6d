#include <nanobind/nanobind.h>

namespace swiftkv {
void bind_attention(nanobind::module_&) {}
}  // namespace swiftkv
