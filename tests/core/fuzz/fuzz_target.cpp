// The entry point that libFuzzer calls.
#include <cstdlib>
#include <exception>
#include <iostream>

#include "history.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    try {
        return swiftkv::fuzz::run_history({data, size}, nullptr) ? 0 : -1;
    } catch (const std::exception& error) {
        std::cerr << error.what() << std::endl;
        std::abort();
    }
}
