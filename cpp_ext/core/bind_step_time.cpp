#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include "step_time.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swiftkv {

void bind_step_time(nb::module_& m) {
    nb::class_<StepWork>(m, "StepWork")
        .def(nb::init<>())
        .def("add_row", &StepWork::add_row, "begin"_a, "num_tokens"_a, "num_guesses"_a = 0)
        .def_rw("num_copies", &StepWork::num_copies)
        .def_ro("num_tokens", &StepWork::num_tokens)
        .def_ro("prompt_pairs", &StepWork::prompt_pairs)
        .def_ro("decode_context", &StepWork::decode_context)
        .def_ro("num_rows", &StepWork::num_rows);
    nb::class_<StepTime>(m, "StepTime")
        .def(nb::init<>())
        .def(nb::init<const StepTime::Terms&, const TokenCurve::Ratios&>(), "coefficients"_a,
             "token_ratios"_a = TokenCurve::straight())
        .def_static("remembered", &StepTime::remembered, "coefficients"_a)
        .def("observe", &StepTime::observe, "work"_a, "duration_s"_a)
        .def("predict", &StepTime::predict, "work"_a)
        .def("longest_chunk", &StepTime::longest_chunk, "work"_a, "begin"_a, "limit_s"_a)
        .def_prop_ro("is_known", &StepTime::is_known)
        .def_prop_ro("error_ratio", &StepTime::error_ratio)
        .def_prop_ro("coefficients", [](const StepTime& t) { return t.latest().coefficients(); })
        .def_prop_ro("token_ratios", [](const StepTime& t) { return t.latest().ratios(); })
        .def_prop_ro("usual_coefficients", [](const StepTime& t) { return t.usual().coefficients(); })
        .def_prop_ro("usual_token_ratios", [](const StepTime& t) { return t.usual().ratios(); });
}

}  // namespace swiftkv
