#include "house.h"

#include "../common/check.h"

namespace swiftkv {

House::House(int num_extents) : owners_(num_extents, kNone), free_(num_extents) {
    for (ExtentId extent = 0; extent < num_extents; ++extent) free_.insert(extent);
}

ExtentId House::take(int group) {
    const ExtentId extent = free_.lowest();
    ensure(extent >= 0, "an extent without an owner is left to take");
    take(group, extent);
    return extent;
}

void House::take(int group, ExtentId extent) {
    ensure(owners_[extent] == kNone, "an extent that is taken had no owner");
    free_.erase(extent);
    owners_[extent] = group;
}

void House::give_back(int group, ExtentId extent) {
    ensure(owners_[extent] == group, "the group that gives an extent back owns it");
    owners_[extent] = kNone;
    free_.insert(extent);
}

void House::check() const {
    for (ExtentId extent = 0; extent < num_extents(); ++extent)
        check_that(free_.contains(extent) == (owners_[extent] == kNone), "extents without an owner are listed");
}

}  // namespace swiftkv
