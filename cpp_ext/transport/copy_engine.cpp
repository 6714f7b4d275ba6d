#include "copy_engine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace swiftkv {
namespace {

constexpr int kMaxThreads = 256;
constexpr int64_t kPortionBytes = 256 << 10;
// Bytes written to a peer are not read here again, so they bypass the caches. Attention reads loaded bytes next, so
// they stay in the caches, unless a job loads more than this.
constexpr int64_t kMaxCachedLoadBytes = 16 << 20;
constexpr int64_t kMinNonTemporalRowBytes = 1 << 10;

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Copies as memcpy does, but with non-temporal stores, which keep the destination out of the caches.
void copy_non_temporal(std::byte* to, const std::byte* from, size_t n) {
#ifdef __SSE2__
    const size_t head = std::min(n, -reinterpret_cast<uintptr_t>(to) & 63);
    std::memcpy(to, from, head);
    size_t i = head;
    for (; i + 64 <= n; i += 64) {
        const auto* source = reinterpret_cast<const __m128i*>(from + i);
        auto* target = reinterpret_cast<__m128i*>(to + i);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    std::memcpy(to + i, from + i, n - i);
#else
    std::memcpy(to, from, n);
#endif
}

// A mutex does not order non-temporal stores; this fence does.
void fence_non_temporal() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

}  // namespace

CopyEngine::CopyEngine(std::span<std::byte> local, int num_threads, size_t max_timings)
    : local_(local), max_timings_(max_timings) {
    if (num_threads < 1 || num_threads > kMaxThreads)
        throw std::invalid_argument("num_threads must be 1 to " + std::to_string(kMaxThreads));
    try {
        for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // the user may have no more threads
        stop();
        throw;
    }
}

CopyEngine::~CopyEngine() {
    stop();
}

void CopyEngine::stop() {
    {
        std::lock_guard lock(mutex_);
        stop_ = true;
    }
    work_ready_.notify_all();
    for (auto& thread : threads_) thread.join();
}

void CopyEngine::set_space(int64_t link, std::span<std::byte> memory) {
    std::unique_lock lock(mutex_);
    job_done_.wait(lock, [this] { return jobs_.empty(); });
    spaces_[link] = memory;
}

void CopyEngine::clear_space(int64_t link) {
    std::unique_lock lock(mutex_);
    job_done_.wait(lock, [this] { return jobs_.empty(); });
    spaces_.erase(link);
}

int64_t CopyEngine::submit(const Runs& to_peer, const Runs& from_peer, int64_t layer) {
    std::lock_guard lock(mutex_);
    Job job;
    job.timing.ticket = ++last_ticket_;
    try {
        job.phases = {make_phase(to_peer, layer, true), make_phase(from_peer, layer, false)};
    } catch (const CopyError& error) {
        failed_.emplace(last_ticket_, error);
    }
    job.timing.to_peer_bytes = job.phases[0].num_bytes;
    job.timing.from_peer_bytes = job.phases[1].num_bytes;
    jobs_.push_back(std::move(job));
    if (jobs_.size() == 1) advance();
    return last_ticket_;
}

void CopyEngine::wait(int64_t ticket) {
    std::unique_lock lock(mutex_);
    if (ticket < 1 || ticket > last_ticket_) throw std::invalid_argument("no such ticket: " + std::to_string(ticket));
    job_done_.wait(lock, [&] { return last_done_ >= ticket; });
    if (const auto failure = failed_.extract(ticket)) throw failure.mapped();
}

void CopyEngine::settle() {
    std::unique_lock lock(mutex_);
    job_done_.wait(lock, [this] { return jobs_.empty(); });
    failed_.clear();
}

std::vector<JobTiming> CopyEngine::take_timings() {
    std::lock_guard lock(mutex_);
    std::vector<JobTiming> taken(timings_.begin(), timings_.end());
    timings_.clear();
    return taken;
}

// Returns the bytes of `space` from the first row of a run to the end of its last row.
std::span<std::byte> CopyEngine::place(std::span<std::byte> space, const char* name, int64_t offset, int64_t pitch,
                                       const Runs& runs, const Run& run) const {
    int64_t size = 0, end = 0;
    if (offset < 0 || __builtin_mul_overflow(run.count - 1, pitch, &size) ||
        __builtin_add_overflow(size, runs.width_bytes, &size) || __builtin_add_overflow(offset, size, &end) ||
        end > static_cast<int64_t>(space.size()))
        throw CopyError(std::string(name) + " of " + std::to_string(space.size()) + " bytes has no " +
                            std::to_string(run.count) + " layer blocks of " + std::to_string(runs.width_bytes) +
                            " bytes at " + std::to_string(offset) + ", one every " + std::to_string(pitch),
                        run.link);
    return space.subspan(static_cast<size_t>(offset), static_cast<size_t>(size));
}

CopyEngine::Phase CopyEngine::make_phase(const Runs& runs, int64_t layer, bool to_peer) const {
    Phase phase;
    const int64_t width = runs.width_bytes, block = runs.block_bytes;
    int64_t layer_offset = 0;
    if (!runs.runs.empty() && (width <= 0 || block < width || layer < 0 ||
                               __builtin_mul_overflow(layer, width, &layer_offset) || layer_offset > block - width))
        throw CopyError("a block of " + std::to_string(block) + " bytes has no layer block " + std::to_string(layer) +
                        " of " + std::to_string(width) + " bytes");
    int64_t portion_bytes = 0;
    const auto add = [&](const Rows& rows) {
        phase.pieces.push_back(rows);
        portion_bytes += rows.count * rows.width;
        if (portion_bytes < kPortionBytes) return;
        phase.ends.push_back(phase.pieces.size());
        portion_bytes = 0;
    };
    for (const Run& run : runs.runs) {
        if (run.count == 0) continue;
        const auto space = spaces_.find(run.link);
        if (run.count < 0) throw CopyError("a run of " + std::to_string(run.count) + " blocks", run.link);
        if (space == spaces_.end()) throw CopyError("link " + std::to_string(run.link) + " is not attached", run.link);
        const int64_t local_pitch = run.staged != 0 ? width : block;
        int64_t peer_offset = 0, local_offset = run.local_offset_bytes;
        if (run.peer_offset_bytes < 0 || run.local_offset_bytes < 0)
            throw CopyError("an offset before the first byte of a pool", run.link);
        if (__builtin_add_overflow(run.peer_offset_bytes, layer_offset, &peer_offset) ||
            (run.staged == 0 && __builtin_add_overflow(run.local_offset_bytes, layer_offset, &local_offset)))
            throw CopyError("an offset beyond all memory", run.link);
        std::byte* peer = place(space->second, "the peer's pool", peer_offset, block, runs, run).data();
        std::byte* local = place(local_, "the local pool", local_offset, local_pitch, runs, run).data();
        phase.num_bytes += run.count * width;
        Rows rows = to_peer ? Rows{peer, local, block, local_pitch, run.count, width}
                            : Rows{local, peer, local_pitch, block, run.count, width};
        if (rows.to_pitch == width && rows.from_pitch == width) {  // contiguous bytes on both sides
            rows.width = kPortionBytes;
            rows.to_pitch = rows.from_pitch = kPortionBytes;
            rows.count = run.count * width / kPortionBytes;
            const int64_t rest = run.count * width - rows.count * kPortionBytes, rest_at = rows.count * kPortionBytes;
            if (rest > 0) add({rows.to + rest_at, rows.from + rest_at, rest, rest, 1, rest});
        }
        const int64_t rows_per_piece = std::max<int64_t>(1, kPortionBytes / rows.width);
        for (int64_t begin = 0; begin < rows.count; begin += rows_per_piece)
            add({rows.to + begin * rows.to_pitch, rows.from + begin * rows.from_pitch, rows.to_pitch, rows.from_pitch,
                 std::min(rows_per_piece, rows.count - begin), rows.width});
    }
    if (portion_bytes > 0) phase.ends.push_back(phase.pieces.size());
    phase.non_temporal = to_peer || phase.num_bytes > kMaxCachedLoadBytes;
    return phase;
}

void CopyEngine::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        work_ready_.wait(lock, [this] { return has_portion() || (stop_ && jobs_.empty()); });
        if (jobs_.empty()) return;
        Job& job = jobs_.front();  // stays where it is until its last portion is done
        Phase& phase = job.phases[job.phase];
        if (phase.taken == 0) phase.begin_s = now_s();
        const size_t portion = phase.taken++;
        lock.unlock();
        copy(phase, portion);
        lock.lock();
        if (++phase.done < phase.ends.size()) continue;
        end_phase(job);
        advance();
    }
}

bool CopyEngine::has_portion() const {
    if (jobs_.empty()) return false;
    const Phase& phase = jobs_.front().phases[jobs_.front().phase];
    return phase.taken < phase.ends.size();
}

void CopyEngine::end_phase(Job& job) {
    const Phase& phase = job.phases[job.phase];
    if (job.timing.begin_s == 0) job.timing.begin_s = phase.begin_s;
    (job.phase == 0 ? job.timing.to_peer_s : job.timing.from_peer_s) = now_s() - phase.begin_s;
    ++job.phase;
}

// Advances to the next phase that has something to copy.
void CopyEngine::advance() {
    bool any_done = false;
    while (!jobs_.empty()) {
        Job& job = jobs_.front();
        while (job.phase < job.phases.size() && job.phases[job.phase].ends.empty()) ++job.phase;
        if (job.phase < job.phases.size()) {
            work_ready_.notify_all();
            break;
        }
        last_done_ = job.timing.ticket;
        timings_.push_back(job.timing);
        if (timings_.size() > max_timings_) timings_.pop_front();
        jobs_.pop_front();
        any_done = true;
    }
    if (any_done) job_done_.notify_all();
    if (stop_ && jobs_.empty()) work_ready_.notify_all();
}

void CopyEngine::copy(const Phase& phase, size_t portion) {
    for (size_t i = portion == 0 ? 0 : phase.ends[portion - 1]; i < phase.ends[portion]; ++i) {
        const Rows& rows = phase.pieces[i];
        const bool non_temporal = phase.non_temporal && rows.width >= kMinNonTemporalRowBytes;
        for (int64_t row = 0; row < rows.count; ++row) {
            std::byte* to = rows.to + row * rows.to_pitch;
            const std::byte* from = rows.from + row * rows.from_pitch;
            if (non_temporal) {
                copy_non_temporal(to, from, static_cast<size_t>(rows.width));
            } else {
                std::memcpy(to, from, static_cast<size_t>(rows.width));
            }
        }
    }
    if (phase.non_temporal) fence_non_temporal();
}

}  // namespace swiftkv
