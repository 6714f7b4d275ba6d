#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "blake3.h"
#include "kv_cache.h"
#include "scheduler.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace swiftkv;

namespace {

template <class T>
using Array = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;
template <class T>
using Input = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// A view that keeps its owner alive.
template <class T>
Array<T> view(std::vector<T>& values, nb::handle owner) {
    return Array<T>(values.data(), {values.size()}, owner);
}

template <class T>
std::span<const T> span_of(const Input<T>& array) {
    return {array.data(), array.size()};
}

std::span<const uint8_t> span_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const uint8_t*>(bytes.c_str()), bytes.size()};
}

nb::bytes to_bytes(const Hash& hash) {
    return nb::bytes(reinterpret_cast<const char*>(hash.data()), sizeof(Hash));
}

template <class Class, class Binding, class T>
void def_array(Binding& binding, const char* name, std::vector<T> Class::* field) {
    binding.def_prop_ro(name, [field](nb::handle_t<Class> self) { return view(nb::cast<Class&>(self).*field, self); });
}

template <class Binding>
void def_arrays(Binding& binding, const char* name, std::vector<std::vector<int32_t>> StepPlan::* field) {
    binding.def_prop_ro(name, [field](nb::handle_t<StepPlan> self) {
        nb::list arrays;
        for (auto& values : nb::cast<StepPlan&>(self).*field) arrays.append(view(values, self));
        return arrays;
    });
}

void bind_plan(nb::module_& m) {
    nb::class_<StepPlan> plan(m, "StepPlan");
    def_array(plan, "token_ids", &StepPlan::token_ids);
    def_array(plan, "positions", &StepPlan::positions);
    def_array(plan, "query_starts", &StepPlan::query_starts);
    def_array(plan, "context_lens", &StepPlan::context_lens);
    def_array(plan, "request_ids", &StepPlan::request_ids);
    def_array(plan, "row_slots", &StepPlan::row_slots);
    def_arrays(plan, "block_tables", &StepPlan::block_tables);
    def_arrays(plan, "table_starts", &StepPlan::table_starts);
    def_array(plan, "logits_rows", &StepPlan::logits_rows);
    def_array(plan, "logits_seqs", &StepPlan::logits_seqs);
    plan.def_ro("num_prompt_tokens_in_step", &StepPlan::num_prompt_tokens);
    def_array(plan, "new_request_ids", &StepPlan::new_request_ids);
    def_array(plan, "new_cached_tokens", &StepPlan::new_cached_tokens);
    def_array(plan, "preempted_request_ids", &StepPlan::preempted_request_ids);

    nb::class_<StepResult> result(m, "StepResult");
    def_array(result, "request_ids", &StepResult::request_ids);
    def_array(result, "token_ids", &StepResult::token_ids);
    def_array(result, "finish_reasons", &StepResult::finish_reasons);
}

void bind_stats(nb::module_& m) {
    nb::class_<GroupStats>(m, "GroupStats")
        .def_ro("free", &GroupStats::free)
        .def_ro("used", &GroupStats::used)
        .def_ro("cached", &GroupStats::cached)
        .def_ro("lent", &GroupStats::lent)
        .def_ro("in_flight", &GroupStats::in_flight)
        .def_ro("total", &GroupStats::total);
    nb::class_<SchedulerStats>(m, "SchedulerStats")
        .def_ro("num_running", &SchedulerStats::num_running)
        .def_ro("num_waiting", &SchedulerStats::num_waiting)
        .def_ro("num_preemptions_total", &SchedulerStats::num_preemptions_total)
        .def_ro("prefix_query_tokens_total", &SchedulerStats::prefix_query_tokens_total)
        .def_ro("prefix_hit_tokens_total", &SchedulerStats::prefix_hit_tokens_total)
        .def_ro("groups", &SchedulerStats::groups);
}

void bind_scheduler(nb::module_& m) {
    nb::class_<GroupSpec>(m, "GroupSpec")
        .def(
            "__init__",
            [](GroupSpec* self, int num_layers, int num_blocks, int window) {
                new (self) GroupSpec{num_layers, num_blocks, window};
            },
            "num_layers"_a, "num_blocks"_a, "window"_a = 0)
        .def_ro("num_layers", &GroupSpec::num_layers)
        .def_ro("num_blocks", &GroupSpec::num_blocks)
        .def_ro("window", &GroupSpec::window);

    nb::class_<Scheduler>(m, "Scheduler")
        .def(
            "__init__",
            [](Scheduler* self, std::vector<GroupSpec> groups, int block_size, int max_num_seqs,
               int max_num_batched_tokens, int max_model_len, bool enable_prefix_caching, bool enable_chunked_prefill) {
                new (self) Scheduler(std::move(groups), {.block_size = block_size,
                                                         .max_num_seqs = max_num_seqs,
                                                         .max_num_batched_tokens = max_num_batched_tokens,
                                                         .max_model_len = max_model_len,
                                                         .enable_prefix_caching = enable_prefix_caching,
                                                         .enable_chunked_prefill = enable_chunked_prefill});
            },
            "groups"_a, "block_size"_a, "max_num_seqs"_a, "max_num_batched_tokens"_a, "max_model_len"_a,
            "enable_prefix_caching"_a = true, "enable_chunked_prefill"_a = true)
        .def(
            "add_request",
            [](Scheduler& self, RequestId request_id, Input<TokenId> prompt, int max_tokens, int min_tokens,
               Input<TokenId> stop_token_ids, nb::bytes cache_namespace, bool skip_prefix_match, int priority) {
                const NewRequest request{.id = request_id,
                                         .prompt = span_of(prompt),
                                         .max_tokens = max_tokens,
                                         .min_tokens = min_tokens,
                                         .stop_token_ids = span_of(stop_token_ids),
                                         .cache_namespace = span_of(cache_namespace),
                                         .skip_prefix_match = skip_prefix_match,
                                         .priority = priority};
                nb::gil_scoped_release released;
                self.add_request(request);
            },
            "request_id"_a, "prompt"_a, "max_tokens"_a, "min_tokens"_a, "stop_token_ids"_a, "namespace"_a,
            "skip_prefix_match"_a, "priority"_a = 0)
        .def(
            "abort", [](Scheduler& self, Input<RequestId> ids) { self.abort(span_of(ids)); }, "request_ids"_a)
        .def("has_work", &Scheduler::has_work)
        .def("schedule", &Scheduler::schedule, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "commit",
            [](Scheduler& self, Input<TokenId> sampled) {
                nb::gil_scoped_release released;
                return self.commit(span_of(sampled));
            },
            "sampled"_a)
        .def("stats", &Scheduler::stats)
        .def("check_invariants", &Scheduler::check_invariants)
        .def("reset_prefix_cache", &Scheduler::reset_prefix_cache);
}

nb::bytes block_keys(nb::bytes cache_namespace, Input<TokenId> token_ids, int block_size) {
    if (block_size <= 0) throw std::invalid_argument("block_size must be positive");
    std::vector<BlockKey> keys;
    extend_keys(keys, blake3(span_of(cache_namespace)), span_of(token_ids), block_size);
    return nb::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(BlockKey));
}

}  // namespace

NB_MODULE(_core, m) {
    m.doc() = "Block pool, prefix tree and scheduler of swiftkv.";
    m.attr("NO_BLOCK") = kNoBlock;
    bind_stats(m);
    bind_plan(m);
    bind_scheduler(m);
    m.def("blake3", [](nb::bytes data) { return to_bytes(blake3(span_of(data))); }, "data"_a);
    m.def("block_keys", &block_keys, "namespace"_a, "token_ids"_a, "block_size"_a);
}
