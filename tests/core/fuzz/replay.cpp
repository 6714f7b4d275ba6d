// Runs the histories in files: replay [--trace] FILE...
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "history.h"

namespace {

const char* running = "";

// Names the input when the core ends the process because an invariant is violated.
void name_input(int) {
    for (const char* text : {running, ": aborted\n"})
        if (write(STDERR_FILENO, text, std::strlen(text)) < 0) return;
}

}  // namespace

int main(int argc, char** argv) {
    std::signal(SIGABRT, name_input);
    std::ostream* trace = nullptr;
    bool has_failed = false;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        running = argv[i];
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
