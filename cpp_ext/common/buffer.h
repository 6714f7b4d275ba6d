// The bytes of a Python object.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <span>
#include <utility>

namespace swiftkv {

// The bytes of a Python object. They cannot go away or move while the Buffer exists.
class Buffer {
  public:
    Buffer(nanobind::handle object, bool is_writable) {
        if (PyObject_GetBuffer(object.ptr(), &view_, is_writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) != 0)
            throw nanobind::python_error();
    }
    Buffer(Buffer&& other) noexcept : view_(std::exchange(other.view_, {})) {}
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    std::span<std::byte> bytes() const { return {static_cast<std::byte*>(view_.buf), static_cast<size_t>(view_.len)}; }

  private:
    Py_buffer view_{};
};

}  // namespace swiftkv
