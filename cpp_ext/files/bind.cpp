#include <nanobind/nanobind.h>
#include <nanobind/stl/filesystem.h>

#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../common/buffer.h"
#include "file_reads.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace swiftkv;

namespace {

// Reads into the memory of Python objects, which it keeps alive.
class Reads {
  public:
    Reads(const nb::sequence& paths, const nb::sequence& into, const nb::sequence& num_more)
        : reads_(to_files(paths, into, num_more, buffers_)) {}

    int64_t wait(size_t index) {
        if (reads_.is_read(index)) return reads_.wait(index);  // giving the GIL away may take longer than all the rest
        const nb::gil_scoped_release released;
        return reads_.wait(index);
    }

    void close() {
        const nb::gil_scoped_release released;
        reads_.stop();
    }

  private:
    static std::vector<FileRead> to_files(const nb::sequence& paths, const nb::sequence& into,
                                          const nb::sequence& num_more, std::vector<Buffer>& buffers) {
        if (nb::len(paths) != nb::len(into) || nb::len(paths) != nb::len(num_more))
            throw std::invalid_argument("into, num_more: there must be one for each path");
        std::vector<FileRead> files;
        for (size_t i = 0; i < nb::len(paths); ++i) {
            const auto pair = nb::cast<nb::tuple>(into[i]);
            if (pair.size() != 2) throw std::invalid_argument("into: a file has a header and a block");
            // The encoding of names is that of the file system, as in Python's own functions.
            FileRead file{nb::cast<std::filesystem::path>(paths[i]), {}, nb::cast<size_t>(num_more[i])};
            for (size_t part = 0; part < 2; ++part) file.parts[part] = buffers.emplace_back(pair[part], true).bytes();
            files.push_back(std::move(file));
        }
        return files;
    }

    std::vector<Buffer> buffers_;
    FileReads reads_;  // ends before the buffers do
};

}  // namespace

NB_MODULE(_files, m) {
    m.doc() = "Reads many files in two threads.";
    nb::class_<Reads>(m, "FileReads")
        .def(nb::init<const nb::sequence&, const nb::sequence&, const nb::sequence&>(), "paths"_a, "into"_a,
             "num_more"_a)
        .def("wait", &Reads::wait, "index"_a)
        .def("close", &Reads::close);
}
