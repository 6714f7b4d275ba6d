#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "admission_order.h"
#include "forecast_errors.h"
#include "prompt_queue.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swiftkv {

void bind_prompt_queue(nb::module_& m) {
    nb::class_<QueuedPrompt>(m, "QueuedPrompt")
        .def(
            "__init__",
            [](QueuedPrompt* self, double num_tokens, double num_left, double arrived_s, int64_t priority,
               double deadline_s, int64_t flow, double flow_weight, double num_coming) {
                new (self)
                    QueuedPrompt{num_tokens, num_left, arrived_s, priority, deadline_s, flow, flow_weight, num_coming};
            },
            "num_tokens"_a, "num_left"_a, "arrived_s"_a, nb::kw_only(), "priority"_a = 0, "deadline_s"_a = 0.0,
            "flow"_a = 0, "flow_weight"_a = 1.0, "num_coming"_a = 0.0)
        .def_ro("num_tokens", &QueuedPrompt::num_tokens)
        .def_ro("num_left", &QueuedPrompt::num_left)
        .def_ro("priority", &QueuedPrompt::priority);
    nb::class_<PromptPace>(m, "PromptPace")
        .def(
            "__init__",
            [](PromptPace* self, double token_s, double pair_s, double overhead_s, double spare_s, double budget) {
                new (self) PromptPace{token_s, pair_s, overhead_s, spare_s, budget};
            },
            nb::kw_only(), "token_s"_a, "pair_s"_a, "overhead_s"_a, "spare_s"_a, "budget"_a)
        .def_ro("overhead_s", &PromptPace::overhead_s)
        .def_prop_ro("step_s", &PromptPace::step_s)
        .def("work_s", &PromptPace::work_s, "prompt"_a)
        .def("steps", &PromptPace::steps, "prompt"_a, "work_s"_a)
        .def("computing_s", &PromptPace::computing_s, "prompt"_a);
    nb::class_<WorkAhead>(m, "WorkAhead")
        .def_ro("steps", &WorkAhead::steps)
        .def_ro("work_s", &WorkAhead::work_s)
        .def_ro("steps_behind", &WorkAhead::steps_behind)
        .def_ro("work_behind_s", &WorkAhead::work_behind_s)
        .def_ro("num_waiting", &WorkAhead::num_waiting)
        .def_ro("tokens_waiting", &WorkAhead::tokens_waiting)
        .def_ro("num_begun", &WorkAhead::num_begun);
    nb::class_<PromptQueue>(m, "PromptQueue")
        .def(
            "__init__",
            [](PromptQueue* self, const std::string& policy) { new (self) PromptQueue(policy_named(policy)); },
            "policy"_a)
        .def("add", &PromptQueue::add, "request_id"_a, "prompt"_a)
        .def("begin", &PromptQueue::begin, "request_id"_a, "num_left"_a)
        .def("expect", &PromptQueue::expect, "request_id"_a, "num_left"_a, "num_coming"_a)
        .def("remove", &PromptQueue::remove, "request_id"_a)
        .def("find", &PromptQueue::find, "request_id"_a)
        .def("advance", &PromptQueue::advance, "now_s"_a, "pace"_a.none())
        .def_prop_ro("is_empty", &PromptQueue::empty)
        .def_prop_ro("has_begun", &PromptQueue::has_begun)
        .def("ahead_of", &PromptQueue::ahead_of, "prompt"_a, "pace"_a)
        .def("overtaking_part", &PromptQueue::overtaking_part, "prompt"_a, "pace"_a, "wait_s"_a)
        .def("end_of_class", &PromptQueue::end_of_class, "priority"_a);
    nb::class_<ForecastErrors>(m, "ForecastErrors")
        .def(nb::init<double>(), "part"_a)
        .def("note", &ForecastErrors::note, "num_left"_a, "forecast_s"_a, "actual_s"_a)
        .def("allowance", &ForecastErrors::allowance, "num_left"_a, "forecast_s"_a);
}

}  // namespace swiftkv
