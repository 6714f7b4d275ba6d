#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

namespace swiftkv {

// One thread's working memory, aligned to cache lines. It grows, never shrinks, and loses its contents when it grows.
class Scratch {
  public:
    std::byte* reserve(int64_t bytes) {
        if (bytes > capacity_) {
            memory_ = nullptr;  // freed first, so that both do not exist together
            capacity_ = 0;
            memory_.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
            capacity_ = bytes;
        }
        return memory_.get();
    }

  private:
    static constexpr std::align_val_t kAlignment{64};
    struct Free {
        void operator()(std::byte* p) const { ::operator delete(p, kAlignment); }
    };
    std::unique_ptr<std::byte, Free> memory_;
    int64_t capacity_ = 0;
};

}  // namespace swiftkv
