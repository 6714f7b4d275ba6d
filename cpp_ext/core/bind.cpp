#include <nanobind/nanobind.h>

NB_MODULE(_core, m) { m.doc() = "Block pool, prefix tree and scheduler of swiftkv."; }
