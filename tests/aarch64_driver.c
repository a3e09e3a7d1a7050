/* Calls the handler of a kernel as XLA would, with a pool of three threads.

   `driver IN OUT`. IN holds int64 numbers: how many arguments and results there are, and for each of them its
   rank (0 or 1), its leading dimension and its size in bytes; then the bytes of the arguments. OUT gets the
   stack that a task takes, an int64, and the bytes of the results. The offsets are those of ffi.py. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

void *ffi_entry(void *frame);
int64_t stack_use(void *null);

struct call {
  void (*work)(void *);
  void *data;
};

static pthread_t threads[64];
static int started;

static void *begin(void *given) {
  struct call call = *(struct call *)given;
  free(given);
  call.work(call.data);
  return NULL;
}

/* args: size, extension, context, work, data */
static void *schedule(void **args) {
  struct call *call = malloc(sizeof *call);
  call->work = (void (*)(void *))args[3];
  call->data = args[4];
  if (started == 64 || pthread_create(&threads[started++], NULL, begin, call)) abort();
  return NULL;
}

/* args: size, extension, context, answer */
static void *pool_size(void **args) {
  *(int64_t *)args[3] = 3;
  return NULL;
}

static void fill(void *into, size_t bytes, FILE *file) {
  if (fread(into, 1, bytes, file) != bytes) abort();
}

int main(int count, char **names) {
  FILE *in = fopen(names[1], "rb");
  int64_t sides[2];
  fill(sides, sizeof sides, in);
  int64_t total = sides[0] + sides[1];
  int64_t (*shapes)[3] = malloc(total * sizeof *shapes);
  fill(shapes, total * sizeof *shapes, in);
  void **buffers = malloc(total * sizeof *buffers);
  for (int64_t i = 0; i < total; i++) {
    /* 24: data, 32: rank, 40: dimensions */
    int64_t *buffer = buffers[i] = calloc(8, 8);
    void *data = malloc(shapes[i][2] + 1);
    if (i < sides[0]) fill(data, shapes[i][2], in);
    buffer[3] = (int64_t)data;
    buffer[4] = shapes[i][0];
    buffer[5] = (int64_t)&shapes[i][1];
  }
  /* 64: destroy an error, 136: schedule, 144: pool size */
  void *api[32] = {0};
  api[17] = schedule;
  api[18] = pool_size;
  /* 16: api, 72: arguments, 112: results */
  void *frame[32] = {0};
  frame[2] = api;
  frame[9] = buffers;
  frame[14] = buffers + sides[0];
  if (ffi_entry(frame)) abort();
  for (int i = 0; i < started; i++) pthread_join(threads[i], NULL);
  FILE *out = fopen(names[2], "wb");
  int64_t used = stack_use(NULL);
  fwrite(&used, sizeof used, 1, out);
  for (int64_t i = sides[0]; i < total; i++)
    fwrite((void *)((int64_t *)buffers[i])[3], 1, shapes[i][2], out);
  return fclose(out) || count != 3;
}
