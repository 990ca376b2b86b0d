/* Runs functions of a library under an emulator, on the memory of the process that asks for them.
 *
 * `emulated LIBRARY` reads a `Call` from stdin, calls the function, and writes what changed. Addresses
 * are those of the process that asks. The first access to a page of its memory raises SIGSEGV here;
 * the handler asks for the page ('P'), maps it at the same address and fills it. After the call, the
 * words that differ are written back ('R'), and all pages are unmapped. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, AT_ONCE = 16, MOST = 1 << 18 };

typedef struct {
  char name[32];
  int64_t integers[32];
  float floats[4];
} Call;

typedef int64_t (*Function)(
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
    int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
    int64_t, int64_t, float, float, float, float);

static char *pages[MOST], *copies; /* pages that are held, and what they held at first */
static int64_t held;
static int locked; /* threads of a call fault at the same time */

static void receive(void *to, int64_t size) {
  for (char *at = to; size;) {
    const int64_t count = read(0, at, size);
    if (count <= 0) _exit(0);
    at += count, size -= count;
  }
}

static void send(const void *from, int64_t size) {
  for (const char *at = from; size;) {
    const int64_t count = write(1, at, size);
    if (count <= 0) _exit(0);
    at += count, size -= count;
  }
}

static int is_held(const char *page) {
  for (int64_t i = held - 1; i >= 0; i--)
    if (pages[i] == page) return 1;
  return 0;
}

static void fetch(int number, siginfo_t *info, void *context) {
  (void)number, (void)context;
  while (__atomic_exchange_n(&locked, 1, __ATOMIC_ACQUIRE)) usleep(100);
  char *page = (char *)((uintptr_t)info->si_addr / PAGE * PAGE);
  if (!is_held(page)) { /* else another thread has fetched it */
    int64_t request[2] = {(intptr_t)page, 1}, there;
    while (request[1] < AT_ONCE && !is_held(page + request[1] * PAGE)) request[1]++;
    send("P", 1);
    send(request, sizeof request);
    receive(&there, sizeof there);
    if (!there || held + there > MOST) _exit(3);
    char *copy = copies + held * PAGE;
    void *filled = mmap(NULL, there * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0); /* moved when it is full, as other threads may read it at once */
    receive(copy, there * PAGE);
    memcpy(filled, copy, there * PAGE);
    if (mremap(filled, there * PAGE, there * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, page) != page)
      _exit(4);
    for (int64_t i = 0; i < there; i++) pages[held++] = page + i * PAGE;
  }
  __atomic_store_n(&locked, 0, __ATOMIC_RELEASE);
}

/* Writes the addresses, lengths and contents of the words that changed. */
static void send_changes(void) {
  for (int64_t i = 0; i < held; i++) {
    const int32_t *now = (const int32_t *)pages[i], *then = (const int32_t *)(copies + i * PAGE);
    for (int64_t first = 0, end; first < PAGE / 4; first = end + 1) {
      while (first < PAGE / 4 && now[first] == then[first]) first++;
      for (end = first; end < PAGE / 4 && now[end] != then[end];) end++;
      const int64_t run[2] = {(intptr_t)(now + first), 4 * (end - first)};
      if (!run[1]) break;
      fwrite(run, sizeof run, 1, stdout);
      fwrite(now + first, run[1], 1, stdout);
    }
  }
  fwrite((int64_t[2]){0, 0}, 16, 1, stdout);
  fflush(stdout);
  for (int64_t i = 0; i < held; i++) munmap(pages[i], PAGE);
  held = 0;
}

int main(int count, char **arguments) {
  void *library = count > 1 ? dlopen(arguments[1], RTLD_NOW) : NULL;
  if (!library) return fprintf(stderr, "%s\n", count > 1 ? dlerror() : "no library"), 2;
  copies = mmap(NULL, (int64_t)MOST * PAGE, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  struct sigaction action = {.sa_sigaction = fetch, .sa_flags = SA_SIGINFO};
  sigaction(SIGSEGV, &action, NULL);
  for (;;) {
    Call call;
    receive(&call, sizeof call);
    const int64_t *n = call.integers;
    const float *x = call.floats;
    void *found = dlsym(library, call.name);
    if (!found) found = dlsym(RTLD_DEFAULT, call.name);
    int64_t result = (intptr_t)found;
    if (found && n[0] >= 0) /* else its address is asked for */
      result = ((Function)found)(n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11],
                                 n[12], n[13], n[14], n[15], n[16], n[17], n[18], n[19], n[20],
                                 n[21], n[22], n[23], n[24], n[25], n[26], n[27], n[28], n[29],
                                 n[30], n[31], 0, x[0], x[1], x[2], x[3]);
    send("R", 1);
    send(&result, sizeof result);
    send_changes();
  }
}
