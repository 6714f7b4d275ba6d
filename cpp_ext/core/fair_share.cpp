#include "fair_share.h"

#include <cmath>

#include "../common/check.h"

namespace swiftkv {

void FairShare::know(int flow, double weight) {
    ensure(flow >= 0 && flow < kMaxFlows && weight >= kMinWeight && weight <= kMaxWeight,
           "a flow's number and weight were checked");
    if (flow >= static_cast<int>(flows_.size())) flows_.resize(flow + 1);
    flows_[flow].token_cost = static_cast<int64_t>(std::floor(kUnit / weight + 0.5));
}

}  // namespace swiftkv
