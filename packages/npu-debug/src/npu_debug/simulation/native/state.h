/* What device.c, memory.c and stream.c need of each other and nobody else does. */
#ifndef NPU_SIM_STATE_H
#define NPU_SIM_STATE_H

#include "sim.h"

#define SIM_MAX_DEVICES 64

/* 0, or the error of a device number that does not exist. */
int sim_check_device(int device);
int sim_check_core_limit(aclrtDevResLimitType type, uint32_t value);

uint64_t sim_device_memory(void);
uint64_t sim_memory_used(int device);
uint64_t sim_now_ns(void);

/* The message of this thread's last failure, without taking it. */
const char *sim_message(void);

/* Give up what the streams of a device (-1: of all devices) still wait for. */
void sim_cancel_streams(int device);
void sim_forget_default_stream(int device);

/* 0, or the error of a handle that is no stream, or the error that the stream has stopped with. */
int sim_stream_check(aclrtStream stream);

/* No task is queued or running: what is asked for now can be done at once by the caller. */
bool sim_stream_idle(aclrtStream stream);

int sim_not_implemented(const char *name, int code) __attribute__((visibility("hidden")));

/* Locks around fork(), so that a child never inherits one that is taken. */
void sim_memory_before_fork(void);
void sim_memory_after_fork(void);

#endif
