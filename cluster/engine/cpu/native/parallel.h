// The process's one OpenMP thread pool (the one torch loaded), used through libgomp's own entry points: that works
// with any compiler, needs no OpenMP headers, and the symbols are resolved from the library already in the process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>

extern "C" {
void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned flags);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

// The place of one thread in its team.
struct Team {
    int rank, size;

    void barrier() const {
        if (size > 1) GOMP_barrier();
    }

    // This thread's share [begin, end) of `count` units, contiguous so that memory is read in order.
    void share(int64_t count, int64_t& begin, int64_t& end) const {
        begin = count * rank / size;
        end = count * (rank + 1) / size;
    }
};

template <class F> void call_body(void* data) {
    Team team{omp_get_thread_num(), omp_get_num_threads()};
    (*static_cast<F*>(data))(team);
}

// Runs body(Team) on up to `threads` threads and returns when all are done.
template <class F> void parallel(int threads, F&& body) {
    if (threads <= 1) {
        body(Team{0, 1});
        return;
    }
    using Body = typename std::remove_reference<F>::type;
    GOMP_parallel(&call_body<Body>, &body, unsigned(threads), 0);
}

// Grow-only scratch memory of the calling thread, aligned to a cache line.
class Scratch {
   public:
    ~Scratch() { free(data_); }

    void* reserve(size_t bytes) {
        if (bytes > size_) {
            free(data_);
            size_ = (bytes + bytes / 2 + 4095) & ~size_t(4095);
            data_ = aligned_alloc(4096, size_);
            if (!data_) abort();
        }
        return data_;
    }

   private:
    void* data_ = nullptr;
    size_t size_ = 0;
};
