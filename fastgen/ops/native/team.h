/* How threads share work: phase by phase, each of which needs the results of the one before.
 *
 * A phase consists of tasks, which threads take one by one. It ends when its tasks are done, not
 * when all threads have arrived: a thread that the system has suspended, or that has not woken yet,
 * delays the others only while it has a task. When it comes back, it continues with the phase that
 * the others have reached. */

#ifndef TEAM_H
#define TEAM_H

#include "vector.h"

/* `run` is GOMP_parallel of the OpenMP runtime that torch has loaded, so that work runs on torch's
 * own threads. It is not called for one thread, and NULL if that runtime has no such function. */
typedef void (*parallel)(void (*work)(void *), void *job, unsigned threads, unsigned flags);

typedef struct Team Team;

/* The tasks that a thread takes of one phase. */
typedef struct {
  Team *team;
  int64_t thread;     /* number of the thread in its team, from 0 on */
  int64_t held;       /* a task that the thread has taken and not begun, or -1 */
  int64_t first, end; /* the tasks of one job */
  int64_t taken;      /* how many the thread has taken */
} Tasks;

/* A job: `work` calls `next` for each task that it does. `together`: whether the next job does not
 * need the results of this one, and belongs to the same phase. */
typedef struct {
  void (*work)(void *job, Tasks *tasks);
  void *job;
  int64_t tasks;
  int together;
} Phase;

int64_t next(Tasks *tasks);
void run_phases(parallel run, unsigned threads, const Phase *phases, int64_t count);
void in_parallel(parallel run, unsigned threads, void (*work)(void *, Tasks *), void *job,
                 int64_t tasks);
void lead(parallel run, unsigned threads, void (*work)(void *), void *job);
unsigned team_size(unsigned threads);
int should_part(void);

#endif
