// Writes a step as flat arrays.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "kv_cache.h"
#include "plan.h"
#include "request.h"
#include "scheduler_limits.h"

namespace swiftkv {

// Writes the step that was planned last as the flat arrays of a StepPlan.
class PlanWriter {
  public:
    PlanWriter(const KvCache& cache, const SchedulerLimits& limits) : cache_(cache), limits_(limits) {}

    // `admitted`: requests that run for the first time. `preempted`: requests sent back to wait since the last plan.
    std::unique_ptr<StepPlan> write(std::span<const StepRow> rows, std::span<Request* const> admitted,
                                    std::vector<RequestId> preempted) const;

  private:
    struct Streamed;

    void write_row(StepPlan& plan, const StepRow& row) const;
    Streamed streamed_blocks(const StepPlan& plan, std::span<const StepRow> rows, int group) const;
    void write_streams(StepPlan& plan, std::span<const StepRow> rows) const;
    void write_stream(StepPlan& plan, int group, int buffer, const Streamed& streamed) const;
    void write_copies(StepPlan& plan) const;

    const KvCache& cache_;
    const SchedulerLimits& limits_;
};

}  // namespace swiftkv
