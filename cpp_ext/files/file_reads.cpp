#include "file_reads.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace swiftkv {
namespace {

// A thread is started in less time than this takes to be read.
constexpr size_t kMinBytesToShare = 1 << 20;
// The number of files that the kernel fetches ahead of the one that is being read.
constexpr size_t kAhead = 8;

size_t num_wanted(const FileRead& file) {
    return file.parts[0].size() + file.parts[1].size() + file.num_more;
}

// An open file; -1 if it cannot be opened, and then errno says why.
class OpenFile {
  public:
    explicit OpenFile(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC)) {}
    OpenFile(const OpenFile&) = delete;
    OpenFile& operator=(const OpenFile&) = delete;
    ~OpenFile() {
        if (fd_ >= 0) close(fd_);
    }

    int fd() const { return fd_; }

  private:
    const int fd_;
};

}  // namespace

FileReads::FileReads(std::vector<FileRead> files) : files_(std::move(files)), results_(files_.size(), kUnread) {
    size_t num_bytes = 0;
    for (const FileRead& file : files_) num_bytes += num_wanted(file);
    if (files_.size() < 2 || num_bytes < kMinBytesToShare) return;
    try {
        helper_ = std::thread([this] { help(); });
    } catch (const std::system_error&) {  // the user may have no more threads; then the one that waits reads all files
    }
}

FileReads::~FileReads() {
    stop();
}

void FileReads::stop() {
    {
        const std::lock_guard lock(mutex_);
        for (; num_begun_ < files_.size(); ++num_begun_) results_[num_begun_] = -ECANCELED;
    }
    if (helper_.joinable()) helper_.join();
}

bool FileReads::is_read(size_t index) {
    const std::lock_guard lock(mutex_);
    return results_.at(index) != kUnread;
}

int64_t FileReads::wait(size_t index) {
    std::unique_lock lock(mutex_);
    while (results_.at(index) == kUnread) {
        if (num_begun_ < files_.size())
            read_next(lock);
        else
            one_was_read_.wait(lock);
    }
    return results_[index];
}

void FileReads::help() {
    std::unique_lock lock(mutex_);
    while (num_begun_ < files_.size()) read_next(lock);
}

void FileReads::read_next(std::unique_lock<std::mutex>& lock) {
    const size_t index = num_begun_++;
    const bool are_missing = num_fetched_ > 0;
    lock.unlock();
    if (are_missing) fetch_ahead(index);
    const int64_t result = read(index);
    lock.lock();
    results_[index] = result;
    one_was_read_.notify_one();
}

int64_t FileReads::read(size_t index) {
    const FileRead& file = files_[index];
    const OpenFile opened(file.path);
    if (opened.fd() < 0) return -errno;
    std::vector<std::byte> more(file.num_more);
    const auto [header, block] = file.parts;
    const std::array<iovec, 3> places{
        {{header.data(), header.size()}, {block.data(), block.size()}, {more.data(), more.size()}}};
    const auto from_the_beginning = [&](int flags) {
        ssize_t num_read;
        do num_read = preadv2(opened.fd(), places.data(), places.size(), 0, flags);
        while (num_read < 0 && errno == EINTR);
        return num_read;
    };
    // One byte is left over at the end of a file, where a read returns less than it was asked for.
    const auto all_but_one = std::max<ssize_t>(static_cast<ssize_t>(num_wanted(file)) - 1, 0);
    if (const ssize_t num_cached = from_the_beginning(RWF_NOWAIT); num_cached >= all_but_one) return num_cached;
    fetch_ahead(index);
    const ssize_t num_read = from_the_beginning(0);
    return num_read < 0 ? -errno : num_read;
}

void FileReads::fetch_ahead(size_t index) {
    size_t begin, end;
    {
        const std::lock_guard lock(mutex_);
        begin = std::max(num_fetched_, index);
        end = num_fetched_ = std::max(num_fetched_, std::min(files_.size(), index + 1 + kAhead));
    }
    for (size_t i = begin; i < end; ++i)
        if (const OpenFile opened(files_[i].path); opened.fd() >= 0)
            posix_fadvise(opened.fd(), 0, 0, POSIX_FADV_WILLNEED);
}

}  // namespace swiftkv
