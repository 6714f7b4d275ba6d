// Runs the histories in files: replay [--trace] FILE...
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "history.h"

int main(int argc, char** argv) {
    std::ostream* trace = nullptr;
    bool has_failed = false;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        if (name == "--trace") {
            trace = &std::cout;
            continue;
        }
        std::ifstream file(name, std::ios::binary);
        if (!file) {
            std::cerr << name << ": cannot be read" << std::endl;
            return 2;
        }
        const std::vector<char> chars{std::istreambuf_iterator<char>(file), {}};
        try {
            swiftkv::fuzz::run_history({reinterpret_cast<const uint8_t*>(chars.data()), chars.size()}, trace);
        } catch (const std::exception& error) {
            std::cerr << name << ": " << error.what() << std::endl;
            has_failed = true;
        }
    }
    return has_failed ? 1 : 0;
}
