#pragma once

// The dtypes of the attention kernels. Include after a simd_*.h; all of it has internal linkage.
#include "attention.h"

namespace swiftkv {
namespace {

constexpr int smaller(int a, int b) {
    return a < b ? a : b;
}
constexpr int larger(int a, int b) {
    return a > b ? a : b;
}
constexpr float kLog2E = 1.44269504088896341f;
constexpr int64_t round_up(int64_t n, int64_t to) {
    return (n + to - 1) / to * to;
}

// The coefficients of 2^x - 1 = x (k0 + x (k1 + ...)) on [-1/2, 1/2] with the least relative error: 3e-6 and 9e-8.
template <int Terms>
constexpr float kExp2[Terms] = {};
template <>
constexpr float kExp2<4>[4] = {0.6931241933f, 0.2402409862f, 0.0559064252f, 0.0095828527f};
template <>
constexpr float kExp2<5>[5] = {0.6931469776f, 0.2402224209f, 0.0555073374f, 0.0096715127f, 0.0013264727f};

// Returns 2^x for finite x < 127: exactly 1 at 0, and 0 or less than 2^-126 from -126.5 down.
template <int Terms>
Simd::V exp2(Simd::V x) {
    const Simd::V whole = Simd::round(x), f = Simd::sub(x, whole);
    Simd::V y = Simd::set1(kExp2<Terms>[Terms - 1]);
#pragma GCC unroll 8
    for (int i = Terms - 2; i >= 0; --i) y = Simd::fma(y, f, Simd::set1(kExp2<Terms>[i]));
    return Simd::scale(Simd::fma(y, f, Simd::set1(1.0f)), whole);
}

// Returns (2^x - 1) / (2^x + 1) = tanh(x ln 2 / 2), off by 2e-7 at most. Beyond 60, within the range of exp2, it is 1.
Simd::V tanh_of_log2(Simd::V x) {
    const Simd::V one = Simd::set1(1.0f), e = exp2<5>(Simd::min(Simd::set1(60.0f), x));
    return Simd::sub(one, Simd::div(Simd::set1(2.0f), Simd::add(e, one)));
}

// The traits of a dtype: how its elements are multiplied. kPack of them lie together along the summed dimension. kLanes
// times kPack elements of K or V are multiplied by kPack queries or weights, kept as Packed, in kSubSteps
// multiplications of a Fragment and an Operand. kIsWidened: elements are converted to float each time they are
// multiplied. weights_of(x) is 2^(x - kWeightShift), to the precision in which weights are kept.
struct Float32 {
    static constexpr bool kIsWidened = false;
    using V = Simd::V;
    using Elem = float;
    using Packed = float;
    using Fragment = V;
    using Operand = V;
    static constexpr int kPack = 1;
    static constexpr int kSubSteps = 1;
    static constexpr int kExpTerms = 5;

    static V load(const Elem* p) { return Simd::load(p); }
    static void store(Elem* p, V x) { Simd::store(p, x); }
    static V round(V x) { return x; }

    static Fragment fragment(const Elem* p, int) { return Simd::load(p); }
    static Fragment first_of_fragment(const Elem* p) { return Simd::load(p); }
    static Operand operand(const Packed* p, int) { return Simd::set1(*p); }
    static V multiply_add(V acc, Fragment a, Operand b) { return Simd::add_product(acc, a, b); }

    static constexpr float kWeightShift = 0.0f;
    static V weights_of(V x) { return exp2<kExpTerms>(x); }
    static void pack(Packed* p, V x) { Simd::store(p, x); }
    static void pack(Packed* p, V first, V second) {
        pack(p, first);
        pack(p + Simd::kLanes, second);
    }
};

struct Float16 : Float32 {
    static constexpr bool kIsWidened = true;
    using Elem = uint16_t;

    static V load(const Elem* p) { return Simd::load_f16(p); }
    static void store(Elem* p, V x) { Simd::store_f16(p, x); }
    static V round(V x) {
        Elem bits[Simd::kLanes];
        store(bits, x);
        return load(bits);
    }

    static Fragment fragment(const Elem* p, int) { return load(p); }
    static Fragment first_of_fragment(const Elem* p) { return load(p); }
};

// bfloat16, multiplied in float32, the first of a pair before the second.
struct BFloat16 : Float32 {
    static constexpr bool kIsWidened = true;
    using Elem = uint16_t;
    static constexpr int kPack = 2;
    static constexpr int kSubSteps = 2;

    static V load(const Elem* p) { return Simd::load_bf16(p); }
    static void store(Elem* p, V x) { Simd::store_bf16(p, x); }
    static V round(V x) {
        Elem bits[Simd::kLanes];
        store(bits, x);
        return load(bits);
    }

    static Fragment fragment(const Elem* p, int sub) {
        return sub == 0 ? Simd::load_bf16_pair_first(p) : Simd::load_bf16_pair_second(p);
    }
    static Fragment first_of_fragment(const Elem* p) { return Simd::load_bf16_pair_first(p); }
    static Operand operand(const Packed* p, int sub) { return Simd::set1(p[sub]); }
};

}  // namespace
}  // namespace swiftkv
