#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace swiftkv {

// A file, the places of its first bytes, and how many bytes more may follow.
struct FileRead {
    std::string path;
    std::array<std::span<std::byte>, 2> parts;
    size_t num_more = 0;
};

// Reads files, each from its beginning, in order. The thread that waits for a file reads too, and if there is much to
// read, a second thread helps it: it reads the next file while the first thread does something with the last one.
//
// Files in the page cache are read as they are. From the first that is not, the kernel fetches the next few ahead.
//
// One thread may call this object. It owns no memory that is read into: that must outlive it.
class FileReads {
  public:
    explicit FileReads(std::vector<FileRead> files);
    ~FileReads();

    // Whether `wait` would return at once.
    bool is_read(size_t index);
    // Returns once a file was read, or could not be: the number of its bytes, as far as there was a place for them, or
    // a negative errno. Throws std::out_of_range if there is no such file.
    int64_t wait(size_t index);
    // Begins to read no more files, and returns when none is being read. The others have -ECANCELED.
    void stop();

  private:
    static constexpr int64_t kUnread = std::numeric_limits<int64_t>::min();

    void help();
    void read_next(std::unique_lock<std::mutex>& lock);
    int64_t read(size_t index);
    void fetch_ahead(size_t index);

    const std::vector<FileRead> files_;

    std::mutex mutex_;  // guards everything below
    std::condition_variable one_was_read_;
    std::vector<int64_t> results_;
    size_t num_begun_ = 0;
    size_t num_fetched_ = 0;  // the end of the files that the kernel was told to fetch; 0: all were there so far
    std::thread helper_;
};

}  // namespace swiftkv
