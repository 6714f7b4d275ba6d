#include "deferral.h"

#include <stdexcept>

namespace swiftkv {

thread_local bool Deferral::is_on_ = false;
thread_local std::vector<std::function<void()>> Deferral::waiting_;

void Deferral::begin() {
    if (is_on_) throw std::logic_error("this thread's kernel calls wait already");
    is_on_ = true;
}

void Deferral::run() {
    const std::vector<std::function<void()>> calls = std::exchange(waiting_, {});
    for (const auto& call : calls) call();
}

void Deferral::end() {
    waiting_.clear();
    is_on_ = false;
}

}  // namespace swiftkv
