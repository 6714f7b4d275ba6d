#include <nanobind/nanobind.h>

NB_MODULE(_cpu, m) { m.doc() = "CPU kernels of swiftkv."; }
