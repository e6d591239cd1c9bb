// See team.h. One thread pool in the process, as large as the largest request so far; idle threads sleep.

#include "team.h"

#include <pthread.h>
#include <sched.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace headrace {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread spins for work, or for the end of other threads' work, before it yields its core, and before it
// sleeps. Some microseconds pass between two kernels of a step; waking takes fifty.
const auto LOOK = std::chrono::microseconds(10), STAY = std::chrono::microseconds(100);
const int GLANCES = 32;  // looks between two looks at the clock

// How much a waiting thread reads ahead at most, which its second cache keeps, and how many lines it asks for between two looks.
const int64_t AHEAD_BYTES = 512 << 10;
const int AHEAD_LINES = 8;

// The scheduler's slice of threads that compute; its default is 3 ms. One that yields gives up the rest of its slice, and a
// thread with a longer one gives it the core as soon as it wakes: see docs/decisions/cpu-kernels.md#slices-of-the-team.
const uint64_t SLICE_NANOSECONDS = 100000;  // the shortest

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

thread_local bool shortened = false;

// Gives this thread, once, short slices where the system has them (Linux 6.12). Threads and processes that it starts have
// the default again.
void shorten_slices() {
  if (shortened) return;
  shortened = true;
#if defined(SYS_sched_setattr) && defined(SYS_sched_getattr)
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
  } attributes = {};  // the first version of the kernel's sched_attr
  const uint64_t RESET_ON_FORK = 1;
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0)) return;
  if (attributes.policy != SCHED_OTHER) return;
  attributes.size = sizeof attributes, attributes.flags |= RESET_ON_FORK, attributes.runtime = SLICE_NANOSECONDS;
  syscall(SYS_sched_setattr, 0, &attributes, 0);
#endif
}

// Whether `ready` came true within STAY, or however long it takes. Meanwhile it calls `idle`, which says whether it had work.
template <class Ready, class Idle>
bool look(Ready ready, bool forever, Idle idle) {
  const auto begin = Clock::now();
  for (bool polite = false;;) {
    for (int i = 0; i < GLANCES; i++) {
      if (ready()) return true;
      if (idle()) continue;
      if (polite) std::this_thread::yield();
      else pause();
    }
    const auto passed = Clock::now() - begin;
    if (!forever && passed > STAY) return false;
    polite = passed > LOOK;
  }
}

class Team {
 public:
  // Runs the tasks alone if the pool is busy with the call of another thread.
  void share(int64_t count, int64_t at_once, int threads, Work work, void *task) {
    if (taken_.exchange(true, std::memory_order_acquire)) return work(task, 0, count, 0);
    grow(threads - 1);
    stand_apart();
    work_ = work, task_ = task, count_ = count, at_once_ = at_once, threads_ = threads;
    const int64_t lots = (count + at_once - 1) / at_once;
    for (int64_t member = 0; member < threads; member++)
      stretches_[member].put({member * lots / threads, (member + 1) * lots / threads});
    turn_.value.fetch_add(1);  // odd: open
    if (asleep_.value.load()) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    take(0);
    turn_.value.fetch_add(1);  // who enters from now on finds it closed
    if (inside_.value.load()) look([&] { return !inside_.value.load(); }, true, [] { return false; });
    taken_.store(false, std::memory_order_release);
  }

  // Two calls at once may mix their ranges: asking for any line does no harm.
  void read_ahead(const void *memory, int64_t bytes) {
    ahead_.store(static_cast<const char *>(memory), std::memory_order_relaxed);
    ahead_bytes_.store(bytes, std::memory_order_relaxed);
    ahead_turn_.value.fetch_add(1, std::memory_order_release);
  }

 private:
  // One cache line each, because different threads write them.
  struct alignas(64) Count {
    std::atomic<int64_t> value{0};
  };

  // Chunks of tasks that are not taken yet. The owner takes the first, so that it reads memory in order; a thread without
  // chunks steals the last (work stealing).
  class alignas(64) Stretch {
   public:
    struct Lots {
      int64_t first, end;
    };

    void put(Lots lots) { lots_.store(pack(lots), std::memory_order_relaxed); }

    // -1: there is none.
    int64_t first() {
      return take([](Lots lots) { return Lots{lots.first + 1, lots.end}; }, [](Lots lots) { return lots.first; });
    }
    int64_t last() {
      return take([](Lots lots) { return Lots{lots.first, lots.end - 1}; }, [](Lots lots) { return lots.end - 1; });
    }

   private:
    static uint64_t pack(Lots lots) { return static_cast<uint64_t>(lots.end) << 32 | static_cast<uint64_t>(lots.first); }

    template <class Left, class Taken>
    int64_t take(Left left, Taken taken) {
      uint64_t packed = lots_.load(std::memory_order_relaxed);
      for (;;) {
        const Lots lots = {static_cast<int64_t>(packed & 0xffffffffu), static_cast<int64_t>(packed >> 32)};
        if (lots.first == lots.end) return -1;
        if (lots_.compare_exchange_weak(packed, pack(left(lots)), std::memory_order_relaxed)) return taken(lots);
      }
    }

    std::atomic<uint64_t> lots_{0};
  };

  void grow(int helpers) {
    if (helpers >= stretches_count_) {
      stretches_.reset(new Stretch[helpers + 1]);
      stretches_count_ = helpers + 1;
    }
    try {
      while (static_cast<int>(helpers_.size()) < helpers) {
        std::thread helper(&Team::help, this, static_cast<int64_t>(helpers_.size()) + 1);
        helpers_.push_back(helper.native_handle());
        helper.detach();
      }
    } catch (const std::system_error &) {  // no more threads are to be had: those that are do it
    }
  }

  // Helpers may be where the sharer may, but for the core that it is on: one that wakes while the other cores are busy
  // for a moment is queued on that core, and stays there for milliseconds after they are free again.
  void stand_apart() {
#if defined(__linux__)
    const int here = sched_getcpu();
    if (here == sharers_ && placed_ == helpers_.size()) return;
    sharers_ = here, placed_ = helpers_.size();
    cpu_set_t elsewhere;
    if (here < 0 || sched_getaffinity(0, sizeof elsewhere, &elsewhere)) return;
    CPU_CLR(here, &elsewhere);
    if (!CPU_COUNT(&elsewhere)) return;
    for (const pthread_t helper : helpers_) pthread_setaffinity_np(helper, sizeof elsewhere, &elsewhere);
#endif
  }

  void take(int64_t member) {
    const auto do_lot = [&](int64_t lot) {
      const int64_t first = lot * at_once_, end = first + at_once_;
      work_(task_, first, end < count_ ? end : count_, member);
    };
    for (int64_t lot; (lot = stretches_[member].first()) >= 0;) do_lot(lot);
    for (int64_t i = 1; i < threads_; i++)
      for (int64_t lot; (lot = stretches_[(member + i) % threads_].last()) >= 0;) do_lot(lot);
  }

  // What a helper has still to ask memory for: the begin of its stretch of the last range.
  struct Ahead {
    int64_t turn = 0;
    const char *next = nullptr, *end = nullptr;
  };

  // Whether there was something to ask for: some lines, few enough that a job does not wait for them.
  bool ask_ahead(Ahead &a, int64_t member) {
    const int64_t turn = ahead_turn_.value.load(std::memory_order_acquire);
    if (turn != a.turn) {
      const int64_t bytes = ahead_bytes_.load(std::memory_order_relaxed), threads = team_threads();
      const int64_t first = bytes / threads * member, last = bytes / threads * (member + 1);
      a.turn = turn;
      a.next = ahead_.load(std::memory_order_relaxed) + first;
      a.end = a.next + (member < threads ? std::min(last - first, AHEAD_BYTES) : 0);
    }
    if (a.next >= a.end) return false;
    for (int i = 0; i < AHEAD_LINES && a.next < a.end; i++, a.next += 64) __builtin_prefetch(a.next, 0, 2);
    return true;
  }

  // A job is read between two changes of `inside_` only, after its turn has been seen once more. Either the sharer, who
  // closes first and then reads `inside_`, sees who has entered, or who enters sees that it is closed.
  void help(int64_t member) {
    shorten_slices();
    int64_t done = 0;
    Ahead ahead;
    const auto opened = [&] {
      const int64_t turn = turn_.value.load();
      return turn % 2 && turn != done;
    };
    for (;;) {
      if (!look(opened, false, [&] { return ask_ahead(ahead, member); })) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.value.fetch_add(1);
        wake_.wait(lock, opened);
        asleep_.value.fetch_sub(1);
      }
      const int64_t turn = turn_.value.load();
      inside_.value.fetch_add(1);
      if (turn % 2 && turn_.value.load() == turn && member < threads_) take(member);
      inside_.value.fetch_sub(1);
      done = turn;
    }
  }

  Count turn_;    // twice the jobs so far, and one while one is open
  Count inside_;  // helpers that may be at the job
  Count asleep_;
  Count ahead_turn_;  // ranges so far that are to be read ahead
  std::atomic<const char *> ahead_{nullptr};
  std::atomic<int64_t> ahead_bytes_{0};
  std::atomic<bool> taken_{false};
  std::unique_ptr<Stretch[]> stretches_;  // of each member, the sharer's first
  int stretches_count_ = 0;
  std::vector<pthread_t> helpers_;
  size_t placed_ = 0;  // of them have been told where to be
  int sharers_ = -1;   // the core that the sharer was on then
  Work work_ = nullptr;
  void *task_ = nullptr;
  int64_t count_ = 0, at_once_ = 1, threads_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_;
};

// Never destroyed: its threads may outlive what is destroyed at the end. A forked child has none of them, and makes its own.
std::atomic<Team *> team{nullptr};

Team &the_team() {
  static const bool once = [] {
    team.store(new Team);
    pthread_atfork(nullptr, nullptr, [] {
      team.store(new Team);
      shortened = false;
    });
    return true;
  }();
  (void)once;
  return *team.load(std::memory_order_relaxed);
}

std::atomic<int> most{0};

}  // namespace

int team_threads() {
  const int set = most.load(std::memory_order_relaxed);
  return set ? set : static_cast<int>(std::thread::hardware_concurrency());
}

void set_team_threads(int threads) { most.store(threads, std::memory_order_relaxed); }

void read_ahead(const void *memory, int64_t bytes) { the_team().read_ahead(memory, bytes); }

void share_out(int64_t count, int64_t at_once, int threads, Work work, void *task) {
  shorten_slices();
  the_team().share(count, at_once, threads, work, task);
}

}  // namespace headrace
