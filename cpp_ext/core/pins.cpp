#include "pins.h"

#include <algorithm>
#include <set>

#include "../common/check.h"

namespace swiftkv {

bool Pins::contains(PinId id) const {
    return std::any_of(pins_.begin(), pins_.end(), [&](const Pin& pin) { return pin.id == id; });
}

PinOutcome Pins::add(PinId id, std::span<const BlockKey> keys, double max_share) {
    ensure(!contains(id), "a pin has a number of its own");
    Pin& pin = pins_.emplace_back(id, std::vector<BlockKey>(), cache_.make_table());
    const int length = cache_.acquire_attended_prefix(pin.table, keys);
    pin.keys.assign(keys.begin(), keys.begin() + length);
    count(pin, 1);
    const double share_with_it = share();
    if (length == 0 || share_with_it > max_share) {
        count(pin, -1);
        cache_.put_back(pin.table);
        pins_.pop_back();
        return {length, share_with_it, false};
    }
    return {length, share_with_it, true};
}

bool Pins::remove(PinId id) {
    const auto found = std::find_if(pins_.begin(), pins_.end(), [&](const Pin& pin) { return pin.id == id; });
    if (found == pins_.end()) return false;
    let_go(*found);
    pins_.erase(found);
    return true;
}

bool Pins::give_way() {
    if (pins_.empty()) return false;
    lost_.push_back(pins_.front().id);
    let_go(pins_.front());
    pins_.pop_front();
    return true;
}

void Pins::drop_broken() {
    std::erase_if(pins_, [&](Pin& pin) {
        if (cache_.is_indexed(pin.table)) return false;
        lost_.push_back(pin.id);
        let_go(pin);
        return true;
    });
}

std::vector<BlockTable*> Pins::tables() {
    std::vector<BlockTable*> tables;
    for (Pin& pin : pins_) tables.push_back(&pin.table);
    return tables;
}

void Pins::let_go(Pin& pin) {
    count(pin, -1);
    cache_.release(pin.table);
}

void Pins::count(const Pin& pin, int by) {
    for (int g = 0; g < cache_.num_groups(); ++g) {
        for (size_t i = pin.table.groups[g].first; i < pin.keys.size(); ++i) {
            const auto held = num_holders_[g].try_emplace(pin.keys[i]).first;
            held->second += by;
            if (held->second == 0) num_holders_[g].erase(held);
        }
    }
}

double Pins::share() const {
    double share = 0;
    for (int g = 0; g < cache_.num_groups(); ++g) {
        const double of_group = static_cast<double>(num_blocks(g)) / cache_.spec(g).num_blocks;
        share = cache_.shares_extents() ? share + of_group : std::max(share, of_group);
    }
    return share;
}

void Pins::check(std::vector<const BlockTable*>& tables, std::vector<const std::vector<BlockKey>*>& keys) const {
    for (const Pin& pin : pins_) {
        tables.push_back(&pin.table);
        keys.push_back(&pin.keys);
        check_that(cache_.is_indexed(pin.table), "a pinned block is in the prefix index");
        check_that(cache_.blocks_in(Place::kPeer, pin.table).empty(), "no pinned block is borrowed");
        for (const BlockTable::Group& held : pin.table.groups)
            check_that(held.entries.size() == pin.keys.size(), "a pin holds one block for each key");
    }
    for (int g = 0; g < cache_.num_groups(); ++g) {
        std::set<int32_t> held;
        for (const Pin& pin : pins_) {
            const BlockTable::Group& table = pin.table.groups[g];
            held.insert(table.entries.begin() + table.first, table.entries.end());
        }
        check_that(std::ssize(held) == num_blocks(g), "the blocks that pins hold are counted");
    }
}

}  // namespace swiftkv
