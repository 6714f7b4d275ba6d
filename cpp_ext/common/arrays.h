// Passes arrays to and from Python without copying their elements.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>
#include <utility>
#include <vector>

namespace swiftkv {

template <class T>
using Array = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>, nanobind::c_contig>;
template <class T>
using Input = nanobind::ndarray<const T, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

template <class T>
std::span<const T> span_of(const Input<T>& array) {
    return {array.data(), array.size()};
}

// Returns an array that owns its values.
template <class T>
Array<T> to_array(std::vector<T> values) {
    auto* owned = new std::vector<T>(std::move(values));
    nanobind::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Array<T>(owned->data(), {owned->size()}, owner);
}

// Calls `call` without the GIL: another thread may hold a lock that the call needs, and wait for the GIL.
template <class Call>
auto without_gil(Call&& call) {
    nanobind::gil_scoped_release released;
    return call();
}

}  // namespace swiftkv
