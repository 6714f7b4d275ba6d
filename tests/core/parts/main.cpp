// Runs one test: parts NAME
#include <exception>
#include <iostream>

#include "parts.h"

int main(int argc, char** argv) {
    const auto test = swiftkv::parts::tests().find(argc == 2 ? argv[1] : "");
    if (test == swiftkv::parts::tests().end()) {
        std::cerr << "no such test" << std::endl;
        return 2;
    }
    try {
        test->second();
    } catch (const std::exception& error) {
        std::cerr << error.what() << std::endl;
        return 1;
    }
    return 0;
}
