/* What the parts of the simulated device share. "Device" memory is host memory of this process; a stream is a queue of
 * tasks; a kernel is run by Python on the host once its stream is idle (see ../kernels.py). */
#ifndef NPU_SIM_H
#define NPU_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <acl/acl.h>

#define EXPORT __attribute__((visibility("default")))

/* Remember the message as this thread's aclGetRecentErrMsg and return the code. */
int sim_fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* One line of the trace: {"time": ..., "pid": ..., "thread": ..., "call": CALL, FIELDS}; FIELDS is JSON without braces, or
 * "". Costs a load and a branch where no trace is asked for. */
#define SIM_TRACE(call, ...) do { if (sim_tracing) sim_trace_line(call, __VA_ARGS__); } while (0)
extern bool sim_tracing;
void sim_trace_line(const char *call, const char *fields, ...) __attribute__((format(printf, 2, 3)));

/* The device that this thread has chosen; -1 before it chose one. */
int sim_current_device(void);

/* Seconds of a monotonic clock. */
double sim_now(void);

/* A task of a stream, run in the order of submission on the stream's own thread. It owns its argument and returns an
 * aclError; an error stays with the stream and every later synchronisation of it returns it. */
typedef int (*sim_task)(void *argument);
int sim_stream_submit(aclrtStream stream, const char *name, sim_task run, void *argument);

/* True once the stream that runs the calling task is being destroyed by force: a waiting task gives up. */
bool sim_task_cancelled(void);

/* Tasks that are queued or running in all streams of this process. Python reads it before each kernel. */
extern EXPORT int32_t sim_pending_tasks;

/* Wait until the stream has run all its tasks; its error if it has one. */
EXPORT int sim_stream_wait(aclrtStream stream);

#endif
