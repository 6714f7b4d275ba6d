#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <limits>

#include "../common/arrays.h"
#include "bind_storage.h"
#include "blake3.h"
#include "kv_cache.h"
#include "scheduler.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace swiftkv;

namespace swiftkv {
void bind_prompt_queue(nb::module_& m);
void bind_step_time(nb::module_& m);
}  // namespace swiftkv

namespace {

// Returns a view of `values` that keeps their owner alive.
template <class T>
Array<T> view(std::vector<T>& values, nb::handle owner) {
    return Array<T>(values.data(), {values.size()}, owner);
}

std::span<const uint8_t> bytes_of(const nb::bytes& bytes) {
    return {reinterpret_cast<const uint8_t*>(bytes.c_str()), bytes.size()};
}

nb::bytes to_bytes(const Hash& hash) {
    return nb::bytes(reinterpret_cast<const char*>(hash.data()), sizeof(Hash));
}

Hash to_hash(const nb::bytes& bytes) {
    Hash hash;
    if (bytes.size() != sizeof(hash))
        throw std::invalid_argument("a block key has " + std::to_string(sizeof(hash)) + " bytes");
    std::memcpy(hash.data(), bytes.c_str(), sizeof(hash));
    return hash;
}

template <class Class, class Binding, class T>
void def_array(Binding& binding, const char* name, std::vector<T> Class::* field) {
    binding.def_prop_ro(name, [field](nb::handle_t<Class> self) { return view(nb::cast<Class&>(self).*field, self); });
}

nb::list views(std::vector<std::vector<int32_t>>& arrays, nb::handle owner) {
    nb::list list;
    for (auto& values : arrays) list.append(view(values, owner));
    return list;
}

// Returns an element. Throws std::out_of_range, which becomes an IndexError.
template <class T>
T& at(std::vector<T>& values, int64_t index, const char* name) {
    if (index < 0 || index >= static_cast<int64_t>(values.size()))
        throw std::out_of_range(std::string(name) + " " + std::to_string(index) + " of " +
                                std::to_string(values.size()));
    return values[index];
}

std::vector<int64_t>& runs_of(StepPlan& plan, int64_t group, const std::string& kind, int64_t buffer) {
    GroupCopies& copies = at(plan.copies, group, "group");
    if (kind == "spill") return copies.spills.rows;
    if (kind == "load") return at(copies.loads, buffer, "buffer").rows;
    if (kind == "store") return at(copies.stores, buffer, "buffer").rows;
    throw std::invalid_argument("a kind of copy must be spill, load or store, not " + kind);
}

bool has_copies(const StepPlan& plan) {
    return std::any_of(plan.copies.begin(), plan.copies.end(), [](const GroupCopies& copies) {
        const auto any = [](const std::vector<CopyRuns>& buffers) {
            return std::any_of(buffers.begin(), buffers.end(), [](const CopyRuns& runs) { return !runs.rows.empty(); });
        };
        return !copies.spills.rows.empty() || any(copies.loads) || any(copies.stores);
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
    plan.def_prop_ro("stream_tables", [](nb::handle_t<StepPlan> self) {
        nb::list tables;
        for (auto& of_buffer : nb::cast<StepPlan&>(self).stream_tables) tables.append(views(of_buffer, self));
        return tables;
    });
    plan.def_prop_ro("table_starts",
                     [](nb::handle_t<StepPlan> self) { return views(nb::cast<StepPlan&>(self).table_starts, self); });
    plan.def_ro("num_stream_buffers", &StepPlan::num_stream_buffers);
    plan.def_prop_ro("has_copies", &has_copies);
    plan.def(
        "copies",
        [](nb::handle_t<StepPlan> self, int64_t group, const std::string& kind, int64_t buffer) {
            std::vector<int64_t>& rows = runs_of(nb::cast<StepPlan&>(self), group, kind, buffer);
            return nb::ndarray<nb::numpy, int64_t, nb::shape<-1, 5>, nb::c_contig>(rows.data(), {rows.size() / 5, 5},
                                                                                   self);
        },
        "group"_a, "kind"_a, "buffer"_a = 0);
    plan.def_prop_ro("local_moves", [](nb::handle_t<StepPlan> self) {
        std::vector<int32_t>& rows = nb::cast<StepPlan&>(self).local_moves;
        return nb::ndarray<nb::numpy, int32_t, nb::shape<-1, 3>, nb::c_contig>(rows.data(), {rows.size() / 3, 3}, self);
    });
    def_array(plan, "logits_rows", &StepPlan::logits_rows);
    def_array(plan, "logits_seqs", &StepPlan::logits_seqs);
    plan.def_ro("has_unknown_tokens", &StepPlan::has_unknown_tokens);
    plan.def_ro("work", &StepPlan::work);
    plan.def_ro("num_prompt_tokens_in_step", &StepPlan::num_prompt_tokens);
    def_array(plan, "new_request_ids", &StepPlan::new_request_ids);
    def_array(plan, "new_cached_tokens", &StepPlan::new_cached_tokens);
    def_array(plan, "new_borrowed_starts", &StepPlan::new_borrowed_starts);
    def_array(plan, "new_borrowed_blocks", &StepPlan::new_borrowed_blocks);
    def_array(plan, "new_host_starts", &StepPlan::new_host_starts);
    def_array(plan, "new_host_blocks", &StepPlan::new_host_blocks);
    def_array(plan, "new_arrivals_s", &StepPlan::new_arrivals_s);
    def_array(plan, "met_request_ids", &StepPlan::met_request_ids);
    plan.def_prop_ro("met_blocks", [](nb::handle_t<StepPlan> self) {
        std::vector<int32_t>& rows = nb::cast<StepPlan&>(self).met_blocks;
        return nb::ndarray<nb::numpy, int32_t, nb::shape<-1, 2>, nb::c_contig>(rows.data(), {rows.size() / 2, 2}, self);
    });
    def_array(plan, "preempted_request_ids", &StepPlan::preempted_request_ids);

    nb::class_<StepResult> result(m, "StepResult");
    def_array(result, "request_ids", &StepResult::request_ids);
    def_array(result, "token_ids", &StepResult::token_ids);
    def_array(result, "finish_reasons", &StepResult::finish_reasons);
    def_array(result, "counts", &StepResult::counts);
}

void bind_stats(nb::module_& m) {
    nb::class_<GroupStats>(m, "GroupStats")
        .def_ro("free", &GroupStats::free)
        .def_ro("used", &GroupStats::used)
        .def_ro("pinned", &GroupStats::pinned)
        .def_ro("cached", &GroupStats::cached)
        .def_ro("lent", &GroupStats::lent)
        .def_ro("in_flight", &GroupStats::in_flight)
        .def_ro("staging", &GroupStats::staging)
        .def_ro("loading", &GroupStats::loading)
        .def_ro("elsewhere", &GroupStats::elsewhere)
        .def_ro("total", &GroupStats::total)
        .def_ro("borrowed_free", &GroupStats::borrowed_free)
        .def_ro("borrowed_used", &GroupStats::borrowed_used)
        .def_ro("borrowed_cached", &GroupStats::borrowed_cached)
        .def_ro("borrowed_in_flight", &GroupStats::borrowed_in_flight)
        .def_ro("staging_layer_blocks", &GroupStats::staging_layer_blocks)
        .def_ro("host_used", &GroupStats::host_used)
        .def_ro("host_cached", &GroupStats::host_cached)
        .def_ro("host_in_flight", &GroupStats::host_in_flight)
        .def_ro("host_loading", &GroupStats::host_loading);
    nb::class_<GroupDemand>(m, "GroupDemand")
        .def_ro("total_peak", &GroupDemand::total_peak)
        .def_ro("longest", &GroupDemand::longest)
        .def_ro("total_now", &GroupDemand::total_now)
        .def_ro("shortfall", &GroupDemand::shortfall);
    nb::class_<SchedulerStats>(m, "SchedulerStats")
        .def_ro("num_running", &SchedulerStats::num_running)
        .def_ro("num_waiting", &SchedulerStats::num_waiting)
        .def_ro("num_preemptions_total", &SchedulerStats::num_preemptions_total)
        .def_ro("num_displaced_total", &SchedulerStats::num_displaced_total)
        .def_ro("prefix_matches_total", &SchedulerStats::prefix_matches_total)
        .def_ro("prefix_query_tokens_total", &SchedulerStats::prefix_query_tokens_total)
        .def_ro("prefix_hit_tokens_total", &SchedulerStats::prefix_hit_tokens_total)
        .def_ro("borrowed_hit_tokens_total", &SchedulerStats::borrowed_hit_tokens_total)
        .def_ro("window_missed_tokens_total", &SchedulerStats::window_missed_tokens_total)
        .def_ro("drafts_total", &SchedulerStats::drafts_total)
        .def_ro("draft_tokens_total", &SchedulerStats::draft_tokens_total)
        .def_ro("accepted_draft_tokens_total", &SchedulerStats::accepted_draft_tokens_total)
        .def_ro("step_s_total", &SchedulerStats::step_s_total)
        .def_ro("step_time_error_ratio", &SchedulerStats::step_time_error_ratio)
        .def_ro("prefill_tokens_per_s", &SchedulerStats::prefill_tokens_per_s)
        .def_ro("groups", &SchedulerStats::groups);
}

// Releases the GIL: another thread may hold the scheduler's mutex and wait for the GIL.
const nb::call_guard<nb::gil_scoped_release> unlocked;

template <void (Scheduler::*method)(int, std::span<const int32_t>)>
void with_extents(Scheduler& self, int link, Input<int32_t> extents) {
    nb::gil_scoped_release released;
    (self.*method)(link, span_of(extents));
}

void bind_scheduler(nb::module_& m) {
    nb::class_<GroupSpec>(m, "GroupSpec")
        .def(
            "__init__",
            [](GroupSpec* self, int num_layers, int num_blocks, int window, int64_t layer_block_bytes,
               int64_t base_offset_bytes, int blocks_per_extent, int host_first, int host_stride, int num_host_blocks,
               int64_t source_offset_bytes, int num_source_chunks) {
                new (self) GroupSpec{num_layers,
                                     num_blocks,
                                     window,
                                     layer_block_bytes,
                                     base_offset_bytes,
                                     blocks_per_extent,
                                     {host_first, host_stride, num_host_blocks},
                                     {source_offset_bytes, num_source_chunks}};
            },
            "num_layers"_a, "num_blocks"_a, "window"_a = 0, "layer_block_bytes"_a = 0, "base_offset_bytes"_a = 0,
            "blocks_per_extent"_a = 0, "host_first"_a = 0, "host_stride"_a = 1, "num_host_blocks"_a = 0,
            "source_offset_bytes"_a = 0, "num_source_chunks"_a = 0)
        .def_ro("num_layers", &GroupSpec::num_layers)
        .def_ro("num_blocks", &GroupSpec::num_blocks)
        .def_ro("window", &GroupSpec::window);

    nb::class_<Link>(m, "Link")
        .def(
            "__init__",
            [](Link* self, int group, int num_extents, int blocks_per_extent, int64_t extent_bytes,
               int64_t base_offset_bytes) {
                new (self) Link{group, num_extents, blocks_per_extent, extent_bytes, base_offset_bytes};
            },
            "group"_a, "num_extents"_a, "blocks_per_extent"_a, "extent_bytes"_a = 0, "base_offset_bytes"_a = 0)
        .def_ro("group", &Link::group)
        .def_ro("num_extents", &Link::num_extents)
        .def_ro("blocks_per_extent", &Link::blocks_per_extent)
        .def_ro("extent_bytes", &Link::extent_bytes)
        .def_ro("base_offset_bytes", &Link::base_offset_bytes);

    nb::class_<Scheduler> scheduler(m, "Scheduler");
    scheduler
        .def(
            "__init__",
            [](Scheduler* self, std::vector<GroupSpec> groups, int block_size, int max_num_seqs,
               int max_num_batched_tokens, int max_model_len, bool enable_prefix_caching, bool enable_chunked_prefill,
               std::vector<Link> lend_links, std::vector<Link> borrow_links, int stream_buffers,
               std::optional<int> retention_interval, std::optional<double> target_tpot_s,
               std::optional<int> long_prefill_token_threshold, std::optional<int> max_num_partial_prefills,
               int max_long_partial_prefills, const std::string& scheduling_policy,
               std::optional<int> num_speculative_tokens, int prompt_lookup_min, int prompt_lookup_max) {
                std::optional<PromptLookup> lookup;
                if (num_speculative_tokens) lookup = {*num_speculative_tokens, prompt_lookup_min, prompt_lookup_max};
                new (self) Scheduler(std::move(groups),
                                     {.block_size = block_size,
                                      .max_num_seqs = max_num_seqs,
                                      .max_num_batched_tokens = max_num_batched_tokens,
                                      .max_model_len = max_model_len,
                                      .enable_prefix_caching = enable_prefix_caching,
                                      .enable_chunked_prefill = enable_chunked_prefill,
                                      .stream_buffers = stream_buffers,
                                      .retention_interval = retention_interval,
                                      .target_tpot_s = target_tpot_s,
                                      .long_prefill_token_threshold = long_prefill_token_threshold,
                                      .max_num_partial_prefills = max_num_partial_prefills,
                                      .max_long_partial_prefills = max_long_partial_prefills,
                                      .policy = policy_named(scheduling_policy),
                                      .prompt_lookup = lookup},
                                     std::move(lend_links), std::move(borrow_links));
            },
            "groups"_a, "block_size"_a, "max_num_seqs"_a, "max_num_batched_tokens"_a, "max_model_len"_a,
            "enable_prefix_caching"_a = true, "enable_chunked_prefill"_a = true, "lend_links"_a = std::vector<Link>(),
            "borrow_links"_a = std::vector<Link>(), "stream_buffers"_a = 2, "retention_interval"_a = nb::none(),
            "target_tpot_s"_a = nb::none(), "long_prefill_token_threshold"_a = nb::none(),
            "max_num_partial_prefills"_a = nb::none(), "max_long_partial_prefills"_a = 1,
            "scheduling_policy"_a = "priority", "num_speculative_tokens"_a = nb::none(), "prompt_lookup_min"_a = 1,
            "prompt_lookup_max"_a = 8)
        .def(
            "add_request",
            [](Scheduler& self, RequestId request_id, Input<TokenId> prompt, int max_tokens, int min_tokens,
               Input<TokenId> stop_token_ids, nb::bytes cache_namespace, bool skip_prefix_match, int64_t priority,
               double arrival_s, double deadline_s, int flow, double flow_weight) {
                const NewRequest request{.id = request_id,
                                         .prompt = span_of(prompt),
                                         .max_tokens = max_tokens,
                                         .min_tokens = min_tokens,
                                         .stop_token_ids = span_of(stop_token_ids),
                                         .cache_namespace = bytes_of(cache_namespace),
                                         .skip_prefix_match = skip_prefix_match,
                                         .priority = priority,
                                         .arrival_s = arrival_s,
                                         .deadline_s = deadline_s,
                                         .flow = flow,
                                         .flow_weight = flow_weight};
                nb::gil_scoped_release released;
                self.add_request(request);
            },
            "request_id"_a, "prompt"_a, "max_tokens"_a, "min_tokens"_a, "stop_token_ids"_a, "namespace"_a,
            "skip_prefix_match"_a, "priority"_a = 0, "arrival_s"_a = 0.0,
            "deadline_s"_a = std::numeric_limits<double>::infinity(), "flow"_a = 0, "flow_weight"_a = 1.0)
        .def(
            "abort",
            [](Scheduler& self, Input<RequestId> ids) {
                nb::gil_scoped_release released;
                self.abort(span_of(ids));
            },
            "request_ids"_a)
        .def(
            "set_draft",
            [](Scheduler& self, RequestId request_id, Input<TokenId> token_ids) {
                nb::gil_scoped_release released;
                self.set_draft(request_id, span_of(token_ids));
            },
            "request_id"_a, "token_ids"_a)
        .def("has_work", &Scheduler::has_work, unlocked)
        .def("schedule", &Scheduler::schedule, "now_s"_a = 0.0, unlocked)
        .def(
            "commit",
            [](Scheduler& self, Input<TokenId> sampled, double duration_s) {
                nb::gil_scoped_release released;
                return self.commit(span_of(sampled), duration_s);
            },
            "sampled"_a, "duration_s"_a = 0.0)
        .def("abandon", &Scheduler::abandon, unlocked)
        .def("starved", &Scheduler::starved, "now_s"_a, "max_wait_s"_a, unlocked)
        .def(
            "lend",
            [](Scheduler& self, int link, int max_extents) {
                return to_array(without_gil([&] { return self.lend(link, max_extents); }));
            },
            "link"_a, "max_extents"_a)
        .def("take_back", &with_extents<&Scheduler::take_back>, "link"_a, "extents"_a.noconvert())
        .def("take_demand", &Scheduler::take_demand, unlocked)
        .def("is_short", &Scheduler::is_short, unlocked)
        .def("borrow", &with_extents<&Scheduler::borrow>, "link"_a, "extents"_a.noconvert())
        .def("recall", &with_extents<&Scheduler::recall>, "link"_a, "extents"_a.noconvert())
        .def(
            "take_returned",
            [](Scheduler& self, int link) { return to_array(without_gil([&] { return self.take_returned(link); })); },
            "link"_a)
        .def("lose", &Scheduler::lose, "link"_a, unlocked)
        .def(
            "begin_loading",
            [](Scheduler& self, nb::bytes key) {
                const BlockKey block_key = to_hash(key);
                return to_array(without_gil([&] { return self.begin_loading(block_key); }));
            },
            "key"_a)
        .def(
            "end_loading",
            [](Scheduler& self, Input<int32_t> blocks, bool is_loaded) {
                nb::gil_scoped_release released;
                self.end_loading(span_of(blocks), is_loaded);
            },
            "blocks"_a.noconvert(), "is_loaded"_a)
        .def("stats", &Scheduler::stats, unlocked)
        .def("step_time", &Scheduler::step_time, unlocked)
        .def("remember_step_time", &Scheduler::remember_step_time, "coefficients"_a, unlocked)
        .def("check_invariants", &Scheduler::check_invariants, unlocked)
        .def("reset_prefix_cache", &Scheduler::reset_prefix_cache, unlocked);
    bind_storage(scheduler);
    bind_events(scheduler);
    bind_pins(scheduler);
}

nb::bytes block_keys(nb::bytes cache_namespace, Input<TokenId> token_ids, int block_size) {
    if (block_size <= 0) throw std::invalid_argument("block_size must be positive");
    std::vector<BlockKey> keys;
    extend_keys(keys, blake3(bytes_of(cache_namespace)), span_of(token_ids), block_size);
    return nb::bytes(reinterpret_cast<const char*>(keys.data()), keys.size() * sizeof(BlockKey));
}

}  // namespace

NB_MODULE(_core, m) {
    m.doc() = "Block pool, prefix index and scheduler of swiftkv.";
    m.attr("NO_BLOCK") = kNoBlock;
    // The objects of a node live until its process ends; nanobind would then report each of them as a leak.
    nb::set_leak_warnings(false);
    m.attr("PRIORITIES_PER_CLASS") = kPrioritiesPerClass;
    bind_stats(m);
    bind_prompt_queue(m);
    bind_step_time(m);
    bind_plan(m);
    bind_scheduler(m);
    m.def("blake3", [](nb::bytes data) { return to_bytes(blake3(bytes_of(data))); }, "data"_a);
    m.def("block_keys", &block_keys, "namespace"_a, "token_ids"_a, "block_size"_a);
}
