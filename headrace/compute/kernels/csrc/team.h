// The threads that a kernel's tasks are shared between. Who shares does its tasks itself, and threads of the team that
// are on a core take some of them; nobody waits for one that is not:
//
//   sharer   publish the job ── take tasks ─────────────── close it ── wait for who is inside ── go on
//   helper          see it ── enter ── take tasks ── leave
//   helper, another program has its core       ...                                       (the job is over: none to enter)
//
// Each begins with a stretch of tasks of its own, in order: what it has asked memory for ahead is what it comes to next.
// Then it takes what others have left, from the end.
//
// OpenMP's threads meet at a barrier after each of the hundreds of loops of a step. Where sockets, clients or other
// programs want a core now and then, one thread spins there for the other's turn, and a step of 2 ms takes 100.

#pragma once
#include <stdint.h>

#include <type_traits>

namespace headrace {

// How many threads a kernel shares its tasks between: of the whole process, as many as there are cores unless it is set.
int team_threads();
void set_team_threads(int threads);

using Work = void (*)(void *task, int64_t first, int64_t end, int64_t member);

// What the next job reads, by about equal stretches of its tasks: threads of the team that wait for it read the begins of their
// stretches into their caches, as long as they wait.
void read_ahead(const void *memory, int64_t bytes);

// The rest of share: by several threads.
void share_out(int64_t count, int64_t at_once, int threads, Work work, void *task);

// task(first, end, member) over all of [0, count), `at_once` at a time, by at most `threads` threads; returns when all is
// done. `member`, below `threads`, is the number of the thread, and the caller's is 0. A task must not share tasks itself.
template <class Task>
static void share(int64_t count, int64_t at_once, int threads, Task &&task) {
  if (threads < 2 || count <= at_once) {
    if (count > 0) task(int64_t{0}, count, int64_t{0});
    return;
  }
  const Work work = [](void *task, int64_t first, int64_t end, int64_t member) {
    (*static_cast<std::remove_reference_t<Task> *>(task))(first, end, member);
  };
  share_out(count, at_once, threads, work, &task);
}

}  // namespace headrace
