#include "plan_writer.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "../common/check.h"

namespace swiftkv {

std::unique_ptr<StepPlan> PlanWriter::write(std::span<const StepRow> rows, std::span<Request* const> admitted,
                                            std::vector<RequestId> preempted) const {
    auto plan = std::make_unique<StepPlan>();
    plan->query_starts.push_back(0);
    plan->stream_tables.assign(1, std::vector<std::vector<int32_t>>(cache_.num_groups()));
    plan->table_starts.assign(cache_.num_groups(), {0});
    for (const StepRow& row : rows) write_row(*plan, row);
    plan->new_borrowed_starts.push_back(0);
    plan->new_host_starts.push_back(0);
    const auto append = [](const std::vector<int32_t>& hits, std::vector<int32_t>& blocks,
                           std::vector<int32_t>& starts) {
        blocks.insert(blocks.end(), hits.begin(), hits.end());
        starts.push_back(static_cast<int32_t>(blocks.size()));
    };
    for (const Request* r : admitted) {
        append(r->borrowed_hits, plan->new_borrowed_blocks, plan->new_borrowed_starts);
        append(r->host_hits, plan->new_host_blocks, plan->new_host_starts);
        plan->new_request_ids.push_back(r->id);
        plan->new_cached_tokens.push_back(r->num_cached);
        plan->new_arrivals_s.push_back(r->arrival_s);
    }
    plan->preempted_request_ids = std::move(preempted);
    for (const auto& [group, from, to] : cache_.local_moves())
        plan->local_moves.insert(plan->local_moves.end(), {group, from, to});
    plan->work.num_copies += static_cast<double>(cache_.local_moves().size());
    plan->copies.resize(cache_.num_groups());
    if (cache_.can_copy()) {
        write_streams(*plan, rows);
        write_copies(*plan);
    }
    return plan;
}

void PlanWriter::write_row(StepPlan& plan, const StepRow& row) const {
    const Request& r = *row.request;
    const int end = r.num_planned(), begin = end - row.num_tokens;
    const int draft_begin = end - static_cast<int>(row.draft.size()), known_end = std::min(draft_begin, r.num_known());
    ensure(begin >= 0 && begin <= known_end, "the tokens of a step are known, except its last one and its draft");
    plan.token_ids.insert(plan.token_ids.end(), r.tokens.begin() + begin, r.tokens.begin() + known_end);
    if (known_end < draft_begin) {
        ensure(end - known_end == 1, "one token of a row is unknown, its last");
        plan.token_ids.push_back(unknown_token(r.slot));
        plan.has_unknown_tokens = true;
    }
    plan.token_ids.insert(plan.token_ids.end(), row.draft.begin(), row.draft.end());
    for (int position = begin; position < end; ++position) plan.positions.push_back(position);
    for (int back = row.num_samples(); back > 0; --back) {
        plan.logits_rows.push_back(static_cast<int32_t>(plan.token_ids.size()) - back);
        plan.logits_seqs.push_back(static_cast<int32_t>(plan.request_ids.size()));
    }
    plan.query_starts.push_back(static_cast<int32_t>(plan.token_ids.size()));
    plan.context_lens.push_back(end);
    plan.request_ids.push_back(r.id);
    plan.row_slots.push_back(r.slot);
    plan.num_prompt_tokens += std::max(0, std::min(end, r.prompt_len) - begin);
    plan.work.add_row(begin, row.num_tokens, static_cast<int>(row.draft.size()));
    const int num_blocks = ceil_div(end, limits_.block_size);
    for (int g = 0; g < cache_.num_groups(); ++g) {
        const std::vector<int32_t>& entries = r.table.groups[g].entries;
        ensure(num_blocks <= static_cast<int>(entries.size()), "there are blocks for what a step computes");
        std::vector<int32_t>& table = plan.stream_tables[0][g];
        table.insert(table.end(), entries.begin(), entries.begin() + num_blocks);
        plan.table_starts[g].push_back(static_cast<int32_t>(table.size()));
    }
}

void CopyRuns::add(int link, int64_t peer_offset, int64_t local_offset, bool staged, int64_t block_bytes,
                   int64_t layer_block_bytes) {
    if (!rows.empty()) {
        int64_t* last = &rows[rows.size() - 5];
        const int64_t local_pitch = staged ? layer_block_bytes : block_bytes;
        if (last[0] == link && last[1] + last[3] * block_bytes == peer_offset &&
            last[2] + last[3] * local_pitch == local_offset && last[4] == staged) {
            ++last[3];
            return;
        }
    }
    rows.insert(rows.end(), {link, peer_offset, local_offset, 1, staged});
}

int64_t CopyRuns::num_blocks() const {
    int64_t sum = 0;
    for (size_t i = 3; i < rows.size(); i += 5) sum += rows[i];
    return sum;
}

// The borrowed blocks of one KV group that the step stages.
struct PlanWriter::Streamed {
    struct Block {
        BlockId source, target;  // the same, unless the block moves from one extent to another
        bool is_loaded, is_stored;
    };
    std::vector<Block> blocks;
    std::unordered_map<BlockId, int> index;  // by target

    void add(BlockId source, BlockId target, bool is_loaded, bool is_stored) {
        // A block that the step writes to belongs to one sequence, so its first row has the right flags.
        if (index.try_emplace(target, static_cast<int>(blocks.size())).second)
            blocks.push_back({source, target, is_loaded, is_stored});
    }
};

PlanWriter::Streamed PlanWriter::streamed_blocks(const StepPlan& plan, std::span<const StepRow> rows, int g) const {
    Streamed streamed;
    if (cache_.pool(g).count(Place::kPeer, BlockState::kUsed) == 0) return streamed;
    for (const auto& [from, to] : cache_.moves_across(g)) streamed.add(from, to, true, true);
    for (size_t s = 0; s < rows.size(); ++s) {
        const int begin = rows[s].request->num_planned() - rows[s].num_tokens, size = limits_.block_size;
        const int32_t* entries = &plan.stream_tables[0][g][plan.table_starts[g][s]];
        for (int i = 0; i < plan.table_starts[g][s + 1] - plan.table_starts[g][s]; ++i)
            if (is_staged(entries[i])) {
                const BlockId block = staged_place(entries[i]);
                streamed.add(block, block, i * size<begin, (i + 1) * size> begin);
            }
    }
    return streamed;
}

// Gives every borrowed block of the step a layer block to be staged in, or two if there is room for two buffers.
void PlanWriter::write_streams(StepPlan& plan, std::span<const StepRow> rows) const {
    std::vector<Streamed> streamed;
    bool is_streaming = false;
    int num_buffers = limits_.stream_buffers;
    for (int g = 0; g < cache_.num_groups(); ++g) {
        streamed.push_back(streamed_blocks(plan, rows, g));
        const int num_streamed = static_cast<int>(streamed[g].blocks.size());
        ensure(num_streamed <= cache_.num_staging_layer_blocks(g), "every borrowed block in use can be staged");
        is_streaming |= num_streamed > 0;
        if (2 * num_streamed > cache_.num_staging_layer_blocks(g)) num_buffers = 1;
    }
    is_streaming |= cache_.has_moves_up();  // with two buffers, each layer is loaded while the one before is computed
    if (!is_streaming) num_buffers = 1;
    plan.num_stream_buffers = is_streaming ? num_buffers : 0;
    plan.stream_tables.resize(num_buffers, plan.stream_tables[0]);
    for (int g = 0; g < cache_.num_groups(); ++g)
        for (int buffer = 0; buffer < num_buffers; ++buffer) write_stream(plan, g, buffer, streamed[g]);
}

void PlanWriter::write_stream(StepPlan& plan, int g, int buffer, const Streamed& streamed) const {
    const GroupSpec& spec = cache_.spec(g);
    const int64_t width = spec.layer_block_bytes, block_bytes = width * spec.num_layers;
    const int num_streamed = static_cast<int>(streamed.blocks.size());
    const auto stage = [&](int i) { return cache_.staging_layer_block(g, buffer * num_streamed + i); };
    CopyRuns& loads = plan.copies[g].loads.emplace_back();
    CopyRuns& stores = plan.copies[g].stores.emplace_back();
    for (int i = 0; i < num_streamed; ++i) {
        const auto& [source, target, is_loaded, is_stored] = streamed.blocks[i];
        const int64_t local_offset = spec.base_offset_bytes + stage(i) * width;
        const auto add_to = [&](CopyRuns& runs, BlockId block) {
            const auto [link, peer_offset] = cache_.locate(g, block);
            runs.add(link, peer_offset, local_offset, true, block_bytes, width);
        };
        if (is_loaded) add_to(loads, source);
        if (is_stored) add_to(stores, target);
    }
    if (num_streamed == 0) return;
    for (int32_t& entry : plan.stream_tables[buffer][g])
        if (is_staged(entry)) entry = staged(stage(streamed.index.at(staged_place(entry))));
}

void PlanWriter::write_copies(StepPlan& plan) const {
    for (int g = 0; g < cache_.num_groups(); ++g) {
        const GroupSpec& spec = cache_.spec(g);
        const int64_t block_bytes = spec.layer_block_bytes * spec.num_layers;
        const auto add_to = [&](CopyRuns& runs, const BlockCopy& copy) {
            const auto [link, peer_offset] = cache_.locate(g, copy.borrowed);
            runs.add(link, peer_offset, spec.base_offset_bytes + copy.local * block_bytes, false, block_bytes,
                     spec.layer_block_bytes);
        };
        for (const BlockCopy& copy : cache_.spills(g)) add_to(plan.copies[g].spills, copy);
        for (CopyRuns& loads : plan.copies[g].loads) {
            for (const BlockCopy& copy : cache_.moves_in(g)) add_to(loads, copy);
            for (const auto& [chunk, local] : cache_.moves_up(g))
                loads.add(cache_.host_link(), spec.source.offset_bytes + chunk * block_bytes,
                          spec.base_offset_bytes + local * block_bytes, false, block_bytes, spec.layer_block_bytes);
        }
        // Every stream buffer copies the same blocks, each its own layers of them.
        const GroupCopies& copies = plan.copies[g];
        plan.work.num_copies += copies.spills.num_blocks();
        if (!copies.loads.empty()) plan.work.num_copies += copies.loads[0].num_blocks() + copies.stores[0].num_blocks();
    }
}

}  // namespace swiftkv
