/* Threads that share the tasks of phases. */

#include "team.h"

#include <time.h>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

/* In place of tasks: all phases are over; the threads part. */
enum { FINISHED = -1, CLOSED = -2 };

/* Looks for work between two readings of the clock, and nanoseconds after which a thread sleeps. */
enum { LOOKS = 64, SPIN = 50 * 1000 };

/* Nanoseconds over which leaders add up what they lose, and for which half of the threads work if
 * that is more than one part in LOST. */
enum { WINDOW = 60 * 1000 * 1000, FEWER = 1000 * 1000 * 1000, LOST = 3 };

struct Team {
  /* The number of the phase, and in the upper half its tasks that nobody has taken. Threads that
   * wait read nothing else of the cache line. */
  _Alignas(64) int64_t ticket;
  _Alignas(64) int64_t tasks;
  int64_t unfinished, helpers;
  const Phase *phase, *next, *end;
  unsigned asleep, wanted, size; /* threads that sleep; those asked for; those of the team */
  int parts_at;                  /* FINISHED if the team runs one list of phases, else CLOSED */
  int64_t began, busy;           /* since when the leader's losses count, and its busy time then */
  void (*work)(void *);
  void *job;
};

static int64_t nanoseconds(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* The team that this thread leads. */
static _Thread_local Team *led;

/* What all leaders have seen lately: the time that has passed in teams; what of it they lost; how
 * often the number of threads is halved, and until when. Leaders that write at once may overwrite
 * each other. */
static struct {
  int64_t passed, lost, halved, until;
} crowd;

#define READ(x) __atomic_load_n(&(x), __ATOMIC_RELAXED)
#define WRITE(x, value) __atomic_store_n(&(x), value, __ATOMIC_RELAXED)

static unsigned allowed(unsigned threads) {
  const unsigned left = threads >> READ(crowd.halved);
  return left ? left : 1;
}

static void begin_to_note(Team *team) {
  team->began = nanoseconds(CLOCK_MONOTONIC), team->busy = nanoseconds(CLOCK_THREAD_CPUTIME_ID);
}

/* Adds up the time that the leader has lost, as others had its processor, or that of a thread that
 * it waited for. Where that is much, fewer threads lose less. */
static void note(Team *team) {
  const int64_t began = team->began, busy = team->busy, halved = READ(crowd.halved);
  begin_to_note(team);
  const int64_t passed = READ(crowd.passed) + team->began - began;
  const int64_t lost = READ(crowd.lost) + team->began - began - (team->busy - busy);
  const int is_full = passed > WINDOW, is_crowded = is_full && lost > passed / LOST;
  const int is_over = halved && team->began > READ(crowd.until);
  /* Of the teams that began alike, one halves the number. */
  if (is_crowded && team->size > 1 && team->size == allowed(team->wanted))
    WRITE(crowd.halved, halved + 1);
  else if (is_over)
    WRITE(crowd.halved, halved - 1);
  if (is_crowded || is_over) WRITE(crowd.until, team->began + FEWER);
  WRITE(crowd.passed, is_full || is_over ? 0 : passed);
  WRITE(crowd.lost, is_full || is_over ? 0 : lost);
}

static int64_t read_ticket(const Team *team) {
  return __atomic_load_n(&team->ticket, __ATOMIC_ACQUIRE);
}

/* Takes a task. Until it is done, the phase cannot end, and what describes it does not change. */
static int take(Tasks *tasks) {
  Team *team = tasks->team;
  int64_t seen = read_ticket(team);
  while (seen >> 32 > 0)
    if (__atomic_compare_exchange_n(&team->ticket, &seen, seen - (1ll << 32), 1, __ATOMIC_ACQUIRE,
                                    __ATOMIC_ACQUIRE)) {
      tasks->held = team->tasks - (seen >> 32);
      tasks->taken++;
      return 1;
    }
  return 0;
}

/* Returns the next task of a job, or -1 if there are no more. */
int64_t next(Tasks *tasks) {
  if (tasks->held < 0) take(tasks);
  if (tasks->held < 0 || tasks->held >= tasks->end) return -1;
  const int64_t task = tasks->held - tasks->first;
  tasks->held = -1;
  return task;
}

/* Works on the jobs of a phase, of which the thread holds a task. */
static void work_on(Tasks *tasks) {
  for (const Phase *phase = tasks->team->phase; tasks->held >= 0; phase++) {
    tasks->first = tasks->end, tasks->end += phase->tasks;
    if (tasks->held < tasks->end) phase->work(phase->job, tasks);
  }
}

#ifdef __linux__
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lower half of a ticket comes first");
#endif

/* Sleeps until the phase is not the one with this number. On other systems, lets other threads run
 * once. The number is the lower half of the ticket, at its address. */
static void sleep_during(const Team *team, uint32_t number) {
#ifdef __linux__
  syscall(SYS_futex, &team->ticket, FUTEX_WAIT_PRIVATE, number, NULL, NULL, 0);
#else
  (void)team, (void)number;
  sched_yield();
#endif
}

static void wake_all(const Team *team) {
#ifdef __linux__
  syscall(SYS_futex, &team->ticket, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
  (void)team;
#endif
}

/* Waits until the phase is not the one with this number. Spins first, as the last task may be about
 * to end; then sleeps, so that a suspended thread can have this core. */
static void wait_during(Team *team, uint32_t number) {
  const int64_t began = nanoseconds(CLOCK_MONOTONIC);
  do
    for (int i = 0; i < LOOKS; i++, relax())
      if ((uint32_t)read_ticket(team) != number) return;
  while (nanoseconds(CLOCK_MONOTONIC) - began < SPIN);
  __atomic_fetch_add(&team->asleep, 1, __ATOMIC_SEQ_CST);
  while ((uint32_t)__atomic_load_n(&team->ticket, __ATOMIC_SEQ_CST) == number)
    sleep_during(team, number);
  __atomic_fetch_sub(&team->asleep, 1, __ATOMIC_RELAXED);
}

static void write_ticket(Team *team, int64_t tasks) {
  const uint32_t number = (uint32_t)read_ticket(team) + 1;
  const int64_t ticket = (int64_t)((uint64_t)tasks << 32 | number);
  __atomic_store_n(&team->ticket, ticket, __ATOMIC_SEQ_CST);
}

static void publish(Team *team, int64_t tasks) {
  write_ticket(team, tasks);
  if (__atomic_load_n(&team->asleep, __ATOMIC_SEQ_CST)) wake_all(team);
}

/* Begins the next phase of several tasks. Its caller does the phases of one task before it. */
static void advance(Team *team, int64_t thread) {
  while (team->next < team->end) {
    team->phase = team->next, team->tasks = 0;
    do team->tasks += team->next->tasks;
    while ((team->next++)->together);
    Tasks alone = {.team = team, .thread = thread};
    if (team->tasks == 1) {
      work_on(&alone);
    } else if (team->tasks) {
      team->unfinished = team->tasks;
      publish(team, team->tasks);
      return;
    }
  }
  if (thread == 0 && team->parts_at == CLOSED)
    write_ticket(team, FINISHED); /* only the leader looks for it */
  else
    publish(team, FINISHED);
}

/* Does tasks of the current phase. The thread that finishes the last one begins the next phase.
 * Returns 0 if there were none. */
static int help(Team *team, int64_t thread) {
  Tasks tasks = {.team = team, .thread = thread, .held = -1};
  if (!take(&tasks)) return 0;
  work_on(&tasks);
  if (!__atomic_sub_fetch(&team->unfinished, tasks.taken, __ATOMIC_ACQ_REL)) advance(team, thread);
  return 1;
}

/* Does tasks until the team is FINISHED or CLOSED. */
static void help_until(Team *team, int64_t thread, int state) {
  for (int64_t seen; (seen = read_ticket(team)) >> 32 != state;)
    if (!help(team, thread)) wait_during(team, (uint32_t)seen);
}

static void join(void *given) {
  Team *team = given;
  if (led != team) {
    help_until(team, __atomic_add_fetch(&team->helpers, 1, __ATOMIC_RELAXED), team->parts_at);
    return;
  }
  team->work(team->job);
  if (team->parts_at == CLOSED) publish(team, CLOSED);
}

/* The team may lie on the stack: `run` returns once all threads have left `join`. */
static void lead_until(int parts_at, parallel run, unsigned threads, void (*work)(void *),
                       void *job) {
  Team team = {.work = work, .job = job, .wanted = run && threads ? threads : 1,
               .parts_at = parts_at};
  team.size = allowed(team.wanted);
  led = &team;
  if (team.size > 1)
    run(join, &team, team.size, 0);
  else
    join(&team);
  if (team.began) note(&team);
  led = NULL;
}

/* Calls work(job). Other threads help with the phases that it runs. */
void lead(parallel run, unsigned threads, void (*work)(void *), void *job) {
  lead_until(CLOSED, run, threads, work, job);
}

typedef struct {
  const Phase *phases;
  int64_t count;
} List;

static void run_list(void *given) {
  const List *list = given;
  /* Single jobs may take less time than reading the clocks. */
  if (led->wanted > 1 && list->count > 1 && !led->began) begin_to_note(led);
  led->next = list->phases, led->end = list->phases + list->count;
  advance(led, 0);
  help_until(led, 0, FINISHED);
}

/* The most tasks that can be done at once. */
static int64_t most_tasks(const Phase *phases, int64_t count) {
  int64_t most = 0, tasks = 0;
  for (int64_t i = 0; i < count; i++) {
    tasks += phases[i].tasks;
    if (tasks > most) most = tasks;
    if (!phases[i].together) tasks = 0;
  }
  return most;
}

/* Runs phases one after the other, on the team that this thread leads, or on `threads`. */
void run_phases(parallel run, unsigned threads, const Phase *phases, int64_t count) {
  List list = {phases, count};
  if (led) {
    run_list(&list);
  } else {
    const int64_t most = most_tasks(phases, count);
    lead_until(FINISHED, run, most < threads ? most : threads, run_list, &list);
  }
}

/* Runs a job, whose tasks need not wait for each other. */
void in_parallel(parallel run, unsigned threads, void (*work)(void *, Tasks *), void *job,
                 int64_t tasks) {
  run_phases(run, threads, &(Phase){.work = work, .job = job, .tasks = tasks}, 1);
}

/* Whether more or fewer threads than those of the team that this thread leads are better. */
int should_part(void) {
  if (led->began) note(led);
  return led->size != allowed(led->wanted);
}

/* The most threads that work on a job: those of the team that this thread leads, or `threads`. */
unsigned team_size(unsigned threads) { return led ? led->size : threads; }
