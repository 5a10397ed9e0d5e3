/* Streams, events, host callbacks. One lock guards all of it: tasks run outside it, and a simulated program has few
 * streams with work at a time.
 *
 * What an idle stream can do at once is done by the caller. Only a task that may wait goes to the stream's own thread,
 * and with it everything that is issued behind it. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "state.h"

struct task {
    struct task *next;
    const char *name;
    sim_task run;
    void *argument;
};

/* The structure of a destroyed stream stays, some hundred bytes, so that a stale handle gives an error, not a crash. */
struct stream {
    uint64_t magic;
    struct stream *next;
    int id, device;
    uint32_t priority, flags, overflow_switch, core_limit[2];
    uint64_t failure_mode;
    bool alive;
    bool cancelled;           /* tasks give up; cleared after an abort, not after destruction by force */
    bool has_thread;
    int pending;              /* tasks queued or running */
    struct task *first, **last;
    pthread_cond_t work;      /* for the stream's thread */
    int error;
    char message[512];
    uint64_t report_thread;   /* where callbacks run; 0 before aclrtSubscribeReport */
};

/* One recording of an event. A wait holds the recording that was current when it was issued, so recording again changes
 * nothing for it. */
struct record {
    int references;
    bool done;
    int error;
    uint64_t nanoseconds;
    char message[256];
};

struct event {
    uint64_t magic;
    uint32_t flags;
    int waits;                /* waits that are issued and not yet over */
    int references;           /* the handle and each pending wait */
    struct record *record;    /* NULL before the first recording */
};

#define STREAM_MAGIC 0x6d61657274736d69u
#define EVENT_MAGIC 0x746e657665736d69u

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;   /* a task, an event or a callback is over, or a stream was cancelled */
static struct stream *streams;
static struct stream *default_streams[SIM_MAX_DEVICES];
static int next_id = 1;
static uint32_t wait_timeout;    /* seconds; 0: none */
static __thread struct stream *running;
static __thread bool skipping;   /* the task is behind a failure */
static __thread struct stream *limits_from; /* aclrtUseStreamResInCurrentThread */

EXPORT int32_t sim_pending_tasks;

bool sim_task_cancelled(void) {
    return skipping || (running && __atomic_load_n(&running->cancelled, __ATOMIC_ACQUIRE));
}

static void init_condition(pthread_cond_t *condition) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void before_fork(void) {
    sim_memory_before_fork();
    pthread_mutex_lock(&lock);
}

static void after_fork(void) {
    pthread_mutex_unlock(&lock);
    sim_memory_after_fork();
}

/* A child has none of the threads, so nothing that was queued will ever run in it: it starts with empty streams. */
static void after_fork_in_child(void) {
    for (struct stream *stream = streams; stream; stream = stream->next) {
        stream->pending = 0;
        stream->first = NULL;
        stream->last = &stream->first;
        stream->has_thread = false;
        init_condition(&stream->work);
    }
    init_condition(&changed);
    sim_pending_tasks = 0;
    running = NULL;
    after_fork();
}

__attribute__((constructor)) static void prepare(void) {
    init_condition(&changed);
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
}

/* ---- waiting ---- */

/* The deadline of a time-out in milliseconds; a negative one is none. */
static bool deadline(int64_t milliseconds, struct timespec *when) {
    if (milliseconds < 0) return false;
    uint64_t nanoseconds = sim_now_ns() + (uint64_t)milliseconds * 1000000u;
    *when = (struct timespec){(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
    return true;
}

/* False once the deadline is over. Called under the lock. */
static bool wait_changed(bool timed, const struct timespec *when) {
    if (!timed) return pthread_cond_wait(&changed, &lock) == 0;
    return pthread_cond_timedwait(&changed, &lock, when) != ETIMEDOUT;
}

/* ---- streams ---- */

static struct stream *new_stream(int device, uint32_t priority, uint32_t flags) {
    struct stream *stream = calloc(1, sizeof *stream);
    if (!stream) return NULL;
    stream->magic = STREAM_MAGIC;
    stream->device = device;
    stream->priority = priority;
    stream->flags = flags;
    stream->alive = true;
    stream->last = &stream->first;
    init_condition(&stream->work);
    pthread_mutex_lock(&lock);
    stream->id = next_id++;
    stream->next = streams;
    streams = stream;
    pthread_mutex_unlock(&lock);
    return stream;
}

/* The stream of a handle; NULL is the current device's default stream. Returns an error code. */
static int get_stream(aclrtStream handle, struct stream **found) {
    struct stream *stream = handle;
    if (!stream) {
        int device = sim_current_device();
        if (device < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has not chosen a device");
        stream = __atomic_load_n(&default_streams[device], __ATOMIC_ACQUIRE);
        if (!stream) {
            stream = new_stream(device, 0, 0);
            if (!stream) return sim_fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "the host has no memory for a stream");
            struct stream *none = NULL;
            /* Where two threads meet, the loser's stream is one that nobody uses. */
            if (!__atomic_compare_exchange_n(&default_streams[device], &none, stream, false, __ATOMIC_ACQ_REL,
                                             __ATOMIC_ACQUIRE))
                stream = none;
        }
    } else if (stream->magic != STREAM_MAGIC || !__atomic_load_n(&stream->alive, __ATOMIC_ACQUIRE))
        return sim_fail(ACL_ERROR_RT_INVALID_HANDLE, "%p is not a stream, or it was destroyed", handle);
    *found = stream;
    return 0;
}

/* The stream's error, which is now also this thread's. */
static int stream_error(const struct stream *stream) {
    if (!__atomic_load_n(&stream->error, __ATOMIC_ACQUIRE)) return 0;
    char text[sizeof stream->message];
    pthread_mutex_lock(&lock);
    int error = stream->error;
    memcpy(text, stream->message, sizeof text);
    pthread_mutex_unlock(&lock);
    return error ? sim_fail(error, "%s", text) : 0;
}

static void add_pending(struct stream *stream, int count) { /* written under the lock, read without it */
    __atomic_add_fetch(&stream->pending, count, __ATOMIC_ACQ_REL);
    __atomic_add_fetch(&sim_pending_tasks, count, __ATOMIC_ACQ_REL);
}

static int run_record(void *argument);

/* Called under the lock by the stream's thread. */
static void run_task(struct stream *stream, struct task *task) {
    /* A recording keeps the lock: who sees the event done also sees its task gone from the stream. */
    bool unlock = task->run != run_record;
    /* A task behind a failure is still called, as a cancelled one, because it owns what its argument holds. */
    skipping = stream->error && stream->failure_mode == ACL_STOP_ON_FAILURE;
    if (unlock) pthread_mutex_unlock(&lock);
    int error = task->run(task->argument);
    if (unlock) pthread_mutex_lock(&lock);
    skipping = false;
    if (error && !stream->error) {
        const char *reason = sim_message();
        if (*reason) snprintf(stream->message, sizeof stream->message, "%.*s", (int)sizeof stream->message - 1, reason);
        else snprintf(stream->message, sizeof stream->message, "%s failed with %d", task->name, error);
        __atomic_store_n(&stream->error, error, __ATOMIC_RELEASE);
    }
    SIM_TRACE("task", "\"name\": \"%s\", \"stream\": %d, \"error\": %d", task->name, stream->id, error);
}

static void *stream_thread(void *argument) {
    struct stream *stream = running = argument;
    aclrtSetDevice(stream->device);
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!stream->first && stream->alive) pthread_cond_wait(&stream->work, &lock);
        struct task *task = stream->first;
        if (!task) break;
        run_task(stream, task);
        stream->first = task->next;
        if (!stream->first) stream->last = &stream->first;
        free(task);
        add_pending(stream, -1);
        pthread_cond_broadcast(&changed);
    }
    stream->has_thread = false;
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* Called under the lock. */
static int enqueue(struct stream *stream, const char *name, sim_task run, void *argument) {
    struct task *task = malloc(sizeof *task);
    if (!task) return sim_fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "%s: the host has no memory for a task", name);
    if (!stream->has_thread) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        int error = pthread_create(&thread, &attributes, stream_thread, stream);
        pthread_attr_destroy(&attributes);
        if (error) {
            free(task);
            return sim_fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "%s: no thread for a stream: %s", name, strerror(error));
        }
        stream->has_thread = true;
    }
    *task = (struct task){NULL, name, run, argument};
    *stream->last = task;
    stream->last = &task->next;
    add_pending(stream, 1);
    pthread_cond_signal(&stream->work);
    return 0;
}

int sim_stream_submit(aclrtStream handle, const char *name, sim_task run, void *argument) {
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (error) return error;
    pthread_mutex_lock(&lock);
    error = enqueue(stream, name, run, argument);
    pthread_mutex_unlock(&lock);
    return error;
}

int sim_stream_check(aclrtStream handle) {
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error && stream->failure_mode == ACL_STOP_ON_FAILURE) error = stream_error(stream);
    return error;
}

bool sim_stream_idle(aclrtStream handle) {
    struct stream *stream;
    return get_stream(handle, &stream) == 0 && __atomic_load_n(&stream->pending, __ATOMIC_ACQUIRE) == 0;
}

static int wait_stream(aclrtStream handle, int64_t milliseconds) {
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (error) return error;
    struct timespec when;
    bool timed = deadline(milliseconds, &when);
    pthread_mutex_lock(&lock);
    while (stream->pending && wait_changed(timed, &when)) continue;
    bool late = stream->pending;
    const char *name = late ? stream->first->name : "";
    pthread_mutex_unlock(&lock);
    if (late)
        return sim_fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "stream %d is still busy with %s after %lld ms", stream->id,
                        name, (long long)milliseconds);
    return stream_error(stream);
}

EXPORT int sim_stream_wait(aclrtStream stream) { return wait_stream(stream, -1); }

static int create_stream(const char *call, aclrtStream *handle, uint32_t priority, uint32_t flags) {
    int device = sim_current_device();
    if (device < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "%s: this thread has not chosen a device", call);
    struct stream *stream = new_stream(device, priority, flags);
    if (!stream) return sim_fail(ACL_ERROR_RT_NO_STREAM_RESOURCE, "%s: the host has no memory", call);
    SIM_TRACE(call, "\"device\": %d, \"stream\": %d", device, stream->id);
    *handle = stream;
    return 0;
}

EXPORT aclError aclrtCreateStream(aclrtStream *stream) { return create_stream("aclrtCreateStream", stream, 0, 0); }

EXPORT aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t priority, uint32_t flags) {
    return create_stream("aclrtCreateStreamWithConfig", stream, priority, flags);
}

static int destroy_stream(const char *call, aclrtStream handle, bool force) {
    struct stream *stream;
    if (!handle) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: a null stream", call);
    int error = get_stream(handle, &stream);
    if (error) return error;
    SIM_TRACE(call, "\"stream\": %d", stream->id);
    /* The caller does not wait: the thread finishes the queue, or with force has its tasks give up, and then ends. */
    pthread_mutex_lock(&lock);
    __atomic_store_n(&stream->alive, false, __ATOMIC_RELEASE);
    if (force) __atomic_store_n(&stream->cancelled, true, __ATOMIC_RELEASE);
    pthread_cond_signal(&stream->work);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT aclError aclrtDestroyStream(aclrtStream stream) { return destroy_stream("aclrtDestroyStream", stream, false); }
EXPORT aclError aclrtDestroyStreamForce(aclrtStream stream) {
    return destroy_stream("aclrtDestroyStreamForce", stream, true);
}

void sim_cancel_streams(int device) {
    pthread_mutex_lock(&lock);
    for (struct stream *stream = streams; stream; stream = stream->next)
        if ((device < 0 || stream->device == device) && stream->pending)
            __atomic_store_n(&stream->cancelled, true, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void sim_forget_default_stream(int device) { __atomic_store_n(&default_streams[device], NULL, __ATOMIC_RELEASE); }

EXPORT aclError aclrtSynchronizeStream(aclrtStream stream) {
    SIM_TRACE("aclrtSynchronizeStream", "\"stream\": \"%p\"", stream);
    return wait_stream(stream, -1);
}

EXPORT aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds) {
    SIM_TRACE("aclrtSynchronizeStreamWithTimeout", "\"stream\": \"%p\", \"milliseconds\": %d", stream, milliseconds);
    return wait_stream(stream, milliseconds);
}

EXPORT aclError aclrtSynchronizeDeviceWithTimeout(int32_t milliseconds) {
    SIM_TRACE("aclrtSynchronizeDeviceWithTimeout", "\"milliseconds\": %d", milliseconds);
    int device = sim_current_device();
    if (device < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has not chosen a device");
    struct timespec when;
    bool timed = deadline(milliseconds, &when);
    struct stream *failed = NULL, *busy;
    pthread_mutex_lock(&lock);
    for (;;) {
        busy = failed = NULL;
        for (struct stream *stream = streams; stream; stream = stream->next) {
            if (stream->device != device || (!stream->alive && !stream->pending)) continue;
            if (stream->pending) busy = stream;
            if (stream->error && stream->alive) failed = stream;
        }
        if (!busy || !wait_changed(timed, &when)) break;
    }
    int id = busy ? busy->id : 0;
    const char *name = busy && busy->first ? busy->first->name : "";
    pthread_mutex_unlock(&lock);
    if (busy)
        return sim_fail(ACL_ERROR_RT_STREAM_SYNC_TIMEOUT, "device %d: stream %d is still busy with %s after %d ms",
                        device, id, name, milliseconds);
    return failed ? stream_error(failed) : 0;
}

EXPORT aclError aclrtSynchronizeDevice(void) { return aclrtSynchronizeDeviceWithTimeout(-1); }

EXPORT aclError aclrtStreamQuery(aclrtStream handle, aclrtStreamStatus *status) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (error) return error;
    *status = sim_stream_idle(handle) ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
    return stream_error(stream);
}

/* Tasks of the device give up and are dropped; its streams can be used afterwards, without the errors they had. */
EXPORT aclError aclrtDeviceTaskAbort(int32_t device, uint32_t milliseconds) {
    SIM_TRACE("aclrtDeviceTaskAbort", "\"device\": %d", device);
    int error = sim_check_device(device);
    if (error) return error;
    sim_cancel_streams(device);
    struct timespec when;
    bool timed = deadline(milliseconds ? (int64_t)milliseconds : -1, &when);
    bool busy;
    pthread_mutex_lock(&lock);
    for (;;) {
        busy = false;
        for (struct stream *stream = streams; stream; stream = stream->next)
            busy |= stream->device == device && stream->pending;
        if (!busy || !wait_changed(timed, &when)) break;
    }
    if (!busy)
        for (struct stream *stream = streams; stream; stream = stream->next)
            if (stream->device == device && stream->alive) {
                __atomic_store_n(&stream->cancelled, false, __ATOMIC_RELEASE);
                __atomic_store_n(&stream->error, 0, __ATOMIC_RELEASE);
            }
    pthread_mutex_unlock(&lock);
    if (!busy) return 0;
    return sim_fail(ACL_ERROR_RT_WAIT_TIMEOUT, "device %d: tasks still run %u ms after an abort", device, milliseconds);
}

EXPORT aclError aclrtStreamGetId(aclrtStream handle, int32_t *id) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error) *id = stream->id;
    return error;
}

EXPORT aclError aclrtStreamGetPriority(aclrtStream handle, uint32_t *priority) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error) *priority = stream->priority;
    return error;
}

EXPORT aclError aclrtStreamGetFlags(aclrtStream handle, uint32_t *flags) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error) *flags = stream->flags;
    return error;
}

EXPORT aclError aclrtSetStreamFailureMode(aclrtStream handle, uint64_t mode) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    if (mode > ACL_STOP_ON_FAILURE)
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "failure mode %llu", (unsigned long long)mode);
    int error = get_stream(handle, &stream);
    if (!error) stream->failure_mode = mode;
    return error;
}

EXPORT aclError aclrtSetStreamOverflowSwitch(aclrtStream handle, uint32_t flag) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error) stream->overflow_switch = flag;
    return error;
}

EXPORT aclError aclrtGetStreamOverflowSwitch(aclrtStream handle, uint32_t *flag) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error) *flag = stream->overflow_switch;
    return error;
}

EXPORT aclError aclrtSetStreamAttribute(aclrtStream handle, aclrtStreamAttr attribute, aclrtStreamAttrValue *value) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (error) return error;
    switch (attribute) {
    case ACL_STREAM_ATTR_FAILURE_MODE: return aclrtSetStreamFailureMode(handle, value->failureMode);
    case ACL_STREAM_ATTR_FLOAT_OVERFLOW_CHECK: stream->overflow_switch = value->overflowSwitch; return 0;
    case ACL_STREAM_ATTR_PRIORITY: stream->priority = value->streamPriority; return 0;
    /* Both only mark what a profiler or a captured graph would show. */
    case ACL_STREAM_ATTR_USER_CUSTOM_TAG:
    case ACL_STREAM_ATTR_CACHE_OP_INFO: return 0;
    default: return sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "stream attribute %d is not known", attribute);
    }
}

EXPORT aclError aclrtSetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type, uint32_t value) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = sim_check_core_limit(type, value);
    if (!error) error = get_stream(handle, &stream);
    if (!error) stream->core_limit[type] = value;
    return error;
}

EXPORT aclError aclrtResetStreamResLimit(aclrtStream handle) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error) stream->core_limit[0] = stream->core_limit[1] = 0;
    return error;
}

EXPORT aclError aclrtGetStreamResLimit(aclrtStream handle, aclrtDevResLimitType type, uint32_t *value) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error) error = aclrtGetDeviceResLimit(stream->device, type, value);
    if (!error && stream->core_limit[type]) *value = stream->core_limit[type];
    return error;
}

EXPORT aclError aclrtUseStreamResInCurrentThread(aclrtStream handle) {
    SIM_TRACE(__func__, "");
    return get_stream(handle, &limits_from);
}

EXPORT aclError aclrtUnuseStreamResInCurrentThread(aclrtStream handle) {
    SIM_TRACE(__func__, "");
    (void)handle;
    limits_from = NULL;
    return 0;
}

EXPORT aclError aclrtGetResInCurrentThread(aclrtDevResLimitType type, uint32_t *value) {
    SIM_TRACE(__func__, "");
    if (limits_from) return aclrtGetStreamResLimit(limits_from, type, value);
    return aclrtGetDeviceResLimit(sim_current_device(), type, value);
}

/* ---- events ---- */

/* All of them are called under the lock. */
static void drop_record(struct record *record) {
    if (record && --record->references == 0) free(record);
}

static void drop_event(struct event *event) {
    if (--event->references) return;
    event->magic = 0;
    drop_record(event->record);
    free(event);
}

static void complete(struct record *record, int error, const char *reason) {
    record->done = true;
    record->error = error;
    if (error) snprintf(record->message, sizeof record->message, "%.*s", (int)sizeof record->message - 1, reason);
    record->nanoseconds = sim_now_ns();
    pthread_cond_broadcast(&changed);
}

static int check_event(const struct event *event) {
    if (event && event->magic == EVENT_MAGIC) return 0;
    return sim_fail(ACL_ERROR_RT_INVALID_HANDLE, "%p is not an event, or it was destroyed", (const void *)event);
}

static int create_event(aclrtEvent *handle, uint32_t flags) {
    /* Other processes cannot see this one's events; torch_npu asks and then does without. */
    if (flags & ACL_EVENT_IPC)
        return sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "events cannot be shared between processes");
    struct event *event = calloc(1, sizeof *event);
    if (!event) return sim_fail(ACL_ERROR_RT_NO_EVENT_RESOURCE, "the host has no memory for an event");
    event->magic = EVENT_MAGIC;
    event->flags = flags;
    event->references = 1;
    *handle = event;
    return 0;
}

EXPORT aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t flags) {
    SIM_TRACE(__func__, "");
    return create_event(event, flags);
}

EXPORT aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flags) {
    SIM_TRACE(__func__, "");
    return create_event(event, flags);
}

EXPORT aclError aclrtCreateEvent(aclrtEvent *event) {
    SIM_TRACE(__func__, "");
    return create_event(event, ACL_EVENT_SYNC | ACL_EVENT_TIME_LINE);
}

EXPORT aclError aclrtDestroyEvent(aclrtEvent handle) {
    SIM_TRACE(__func__, "");
    int error = check_event(handle);
    if (error) return error;
    pthread_mutex_lock(&lock);
    drop_event(handle);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* Called under the lock. */
static int run_record(void *argument) {
    struct record *record = argument;
    int error = running->error && running->failure_mode == ACL_STOP_ON_FAILURE ? running->error : 0;
    if (!error && sim_task_cancelled()) error = ACL_ERROR_RT_DEVICE_TASK_ABORT;
    complete(record, error, running->error ? running->message : "the tasks before the event were aborted");
    drop_record(record);
    return 0;
}

EXPORT aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
    SIM_TRACE("aclrtRecordEvent", "\"event\": \"%p\", \"stream\": \"%p\"", handle, stream_handle);
    struct event *event = handle;
    struct stream *stream;
    int error = check_event(event);
    if (!error) error = get_stream(stream_handle, &stream);
    if (error) return error;
    struct record *record = calloc(1, sizeof *record);
    if (!record) return sim_fail(ACL_ERROR_RT_NO_EVENT_RESOURCE, "the host has no memory for an event");
    record->references = 1;
    pthread_mutex_lock(&lock);
    if (!stream->pending)
        complete(record, stream->failure_mode == ACL_STOP_ON_FAILURE ? stream->error : 0, stream->message);
    else {
        record->references++;
        error = enqueue(stream, "aclrtRecordEvent", run_record, record);
    }
    drop_record(event->record);
    event->record = record;
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
    SIM_TRACE(__func__, "");
    (void)stream;
    struct event *event = handle;
    int error = check_event(event);
    if (error) return error;
    pthread_mutex_lock(&lock);
    drop_record(event->record);
    event->record = NULL;
    pthread_mutex_unlock(&lock);
    return 0;
}

struct wait {
    struct event *event;
    struct record *record;
};

static int run_wait(void *argument) {
    struct wait *wait = argument;
    struct timespec when;
    pthread_mutex_lock(&lock);
    bool timed = deadline(wait_timeout ? (int64_t)wait_timeout * 1000 : -1, &when), in_time = true;
    while (!wait->record->done && !sim_task_cancelled() && in_time) in_time = wait_changed(timed, &when);
    int error = 0;
    if (!wait->record->done && sim_task_cancelled())
        error = sim_fail(ACL_ERROR_RT_DEVICE_TASK_ABORT, "a wait for an event was aborted");
    else if (!wait->record->done)
        error = sim_fail(ACL_ERROR_RT_TASK_TIMEOUT, "no event after %u s (aclrtSetOpWaitTimeout)", wait_timeout);
    else if (wait->record->error) error = sim_fail(wait->record->error, "%s", wait->record->message);
    wait->event->waits--;
    drop_record(wait->record);
    drop_event(wait->event);
    pthread_mutex_unlock(&lock);
    free(wait);
    return error;
}

EXPORT aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
    SIM_TRACE("aclrtStreamWaitEvent", "\"event\": \"%p\", \"stream\": \"%p\"", handle, stream_handle);
    struct event *event = handle;
    struct stream *stream;
    int error = check_event(event);
    if (!error) error = get_stream(stream_handle, &stream);
    if (error) return error;
    pthread_mutex_lock(&lock);
    struct record *record = event->record;
    if (!record || (record->done && !record->error)) { /* nothing to wait for */
        pthread_mutex_unlock(&lock);
        return 0;
    }
    struct wait *wait = malloc(sizeof *wait);
    if (wait) {
        *wait = (struct wait){event, record};
        record->references++;
        event->references++;
        event->waits++;
        error = enqueue(stream, "aclrtStreamWaitEvent", run_wait, wait);
    } else
        error = sim_fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "the host has no memory for a wait");
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT aclError aclrtSetOpWaitTimeout(uint32_t seconds) {
    SIM_TRACE("aclrtSetOpWaitTimeout", "\"seconds\": %u", seconds);
    pthread_mutex_lock(&lock);
    wait_timeout = seconds;
    pthread_mutex_unlock(&lock);
    return 0;
}

/* An event that was never recorded is not ready, as the device's runtime says it. */
EXPORT aclError aclrtQueryEventStatus(aclrtEvent handle, aclrtEventRecordedStatus *status) {
    SIM_TRACE(__func__, "");
    struct event *event = handle;
    int error = check_event(event);
    if (error) return error;
    pthread_mutex_lock(&lock);
    struct record *record = event->record;
    bool done = record && record->done;
    error = done && record->error ? sim_fail(record->error, "%s", record->message) : 0;
    pthread_mutex_unlock(&lock);
    *status = done ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
    return error;
}

EXPORT aclError aclrtQueryEventWaitStatus(aclrtEvent handle, aclrtEventWaitStatus *status) {
    SIM_TRACE(__func__, "");
    struct event *event = handle;
    int error = check_event(event);
    if (error) return error;
    pthread_mutex_lock(&lock);
    *status = event->waits ? ACL_EVENT_WAIT_STATUS_NOT_READY : ACL_EVENT_WAIT_STATUS_COMPLETE;
    pthread_mutex_unlock(&lock);
    return 0;
}

static int wait_event(aclrtEvent handle, int64_t milliseconds) {
    SIM_TRACE("aclrtSynchronizeEvent", "\"event\": \"%p\"", handle);
    struct event *event = handle;
    int error = check_event(event);
    if (error) return error;
    struct timespec when;
    bool timed = deadline(milliseconds, &when), in_time = true;
    pthread_mutex_lock(&lock);
    struct record *record = event->record;
    if (record) {
        record->references++;
        while (!record->done && in_time) in_time = wait_changed(timed, &when);
        if (!record->done)
            error = sim_fail(ACL_ERROR_RT_EVENT_SYNC_TIMEOUT, "no event after %lld ms", (long long)milliseconds);
        else if (record->error)
            error = sim_fail(record->error, "%s", record->message);
        drop_record(record);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

EXPORT aclError aclrtSynchronizeEvent(aclrtEvent event) { return wait_event(event, -1); }

EXPORT aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t milliseconds) {
    return wait_event(event, milliseconds);
}

/* The time of the current recording in nanoseconds. */
static int event_time(struct event *event, uint64_t *nanoseconds) {
    int error = check_event(event);
    if (error) return error;
    if (!(event->flags & ACL_EVENT_TIME_LINE))
        return sim_fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event was created without ACL_EVENT_TIME_LINE");
    pthread_mutex_lock(&lock);
    bool done = event->record && event->record->done;
    if (done) *nanoseconds = event->record->nanoseconds;
    pthread_mutex_unlock(&lock);
    return done ? 0 : sim_fail(ACL_ERROR_RT_EVENT_TIMESTAMP_INVALID, "the event is not recorded yet");
}

EXPORT aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end) {
    SIM_TRACE(__func__, "");
    uint64_t from, to;
    int error = event_time(start, &from);
    if (!error) error = event_time(end, &to);
    if (error) return error;
    *milliseconds = (float)((double)(int64_t)(to - from) * 1e-6);
    return 0;
}

EXPORT aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
    SIM_TRACE(__func__, "");
    uint64_t nanoseconds;
    int error = event_time(event, &nanoseconds);
    if (!error) *microseconds = nanoseconds / 1000;
    return error;
}

/* ---- callbacks ---- */

struct call {
    void (*function)(void *);
    void *argument;
    bool blocks;
    /* Of aclrtLaunchCallback only: */
    struct call *next;
    uint64_t thread;
    bool done;
};

static int run_host_function(void *argument) {
    struct call *call = argument;
    if (!sim_task_cancelled()) call->function(call->argument);
    free(call);
    return 0;
}

static struct call *new_call(void (*function)(void *), void *argument) {
    struct call *call = calloc(1, sizeof *call);
    if (call) call->function = function, call->argument = argument;
    return call;
}

EXPORT aclError aclrtLaunchHostFunc(aclrtStream handle, aclrtHostFunc function, void *argument) {
    SIM_TRACE("aclrtLaunchHostFunc", "\"stream\": \"%p\"", handle);
    int error = function ? sim_stream_check(handle) : sim_fail(ACL_ERROR_RT_PARAM_INVALID, "a null function");
    if (error) return error;
    struct call *call = new_call(function, argument);
    if (!call) return sim_fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "the host has no memory for a callback");
    return sim_stream_submit(handle, "aclrtLaunchHostFunc", run_host_function, call);
}

static struct call *reports; /* callbacks that wait for their thread's aclrtProcessReport, oldest first */

static int run_report(void *argument) {
    struct call *call = argument;
    pthread_mutex_lock(&lock);
    if (sim_task_cancelled()) {
        pthread_mutex_unlock(&lock);
        free(call);
        return 0;
    }
    struct call **last = &reports;
    while (*last) last = &(*last)->next;
    *last = call;
    pthread_cond_broadcast(&changed);
    bool blocks = call->blocks;
    while (blocks && !call->done && !sim_task_cancelled()) wait_changed(false, NULL);
    /* Whoever comes last frees it: a call that does not block is freed by the thread that runs it. */
    if (blocks && call->done) free(call);
    else call->blocks = false;
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT aclError aclrtSubscribeReport(uint64_t thread, aclrtStream handle) {
    SIM_TRACE("aclrtSubscribeReport", "\"stream\": \"%p\"", handle);
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error && stream->report_thread)
        error = sim_fail(ACL_ERROR_REPEAT_SUBSCRIBE, "the stream has a thread for callbacks");
    if (!error) stream->report_thread = thread;
    return error;
}

EXPORT aclError aclrtUnSubscribeReport(uint64_t thread, aclrtStream handle) {
    SIM_TRACE(__func__, "");
    struct stream *stream;
    int error = get_stream(handle, &stream);
    if (!error && (!stream->report_thread || stream->report_thread != thread))
        error = sim_fail(ACL_ERROR_STREAM_NOT_SUBSCRIBE, "the stream has no such thread for callbacks");
    if (!error) stream->report_thread = 0;
    return error;
}

EXPORT aclError aclrtLaunchCallback(aclrtCallback function, void *argument, aclrtCallbackBlockType type,
                                    aclrtStream handle) {
    SIM_TRACE("aclrtLaunchCallback", "\"stream\": \"%p\"", handle);
    struct stream *stream;
    int error = function ? sim_stream_check(handle) : sim_fail(ACL_ERROR_RT_PARAM_INVALID, "a null function");
    if (!error) error = get_stream(handle, &stream);
    if (error) return error;
    if (!stream->report_thread)
        return sim_fail(ACL_ERROR_STREAM_NOT_SUBSCRIBE, "aclrtLaunchCallback: no thread (aclrtSubscribeReport)");
    struct call *call = new_call(function, argument);
    if (!call) return sim_fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "the host has no memory for a callback");
    call->blocks = type == ACL_CALLBACK_BLOCK;
    call->thread = stream->report_thread;
    return sim_stream_submit(handle, "aclrtLaunchCallback", run_report, call);
}

EXPORT aclError aclrtProcessReport(int32_t milliseconds) {
    SIM_TRACE(__func__, "");
    uint64_t thread = (uint64_t)pthread_self();
    struct timespec when;
    bool timed = deadline(milliseconds, &when), in_time = true;
    struct call *call = NULL, **link;
    pthread_mutex_lock(&lock);
    for (;;) {
        for (link = &reports; *link && (*link)->thread != thread; link = &(*link)->next) continue;
        call = *link;
        if (call || !in_time) break;
        in_time = wait_changed(timed, &when);
    }
    if (call) *link = call->next;
    pthread_mutex_unlock(&lock);
    if (!call) return sim_fail(ACL_ERROR_RT_REPORT_TIMEOUT, "no callback within %d ms", milliseconds);
    call->function(call->argument);
    pthread_mutex_lock(&lock);
    call->done = true;
    if (!call->blocks) free(call);
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ---- values in memory ---- */

struct value {
    uint64_t *address, value;
    uint32_t flag;
};

static bool holds(const struct value *value) {
    uint64_t now = __atomic_load_n(value->address, __ATOMIC_ACQUIRE);
    switch (value->flag) {
    case ACL_STREAM_WAIT_VALUE_GEQ: return now >= value->value;
    case ACL_STREAM_WAIT_VALUE_EQ: return now == value->value;
    case ACL_STREAM_WAIT_VALUE_AND: return (now & value->value) != 0;
    default: return ~(now | value->value) != 0;
    }
}

static int run_value_write(void *argument) {
    struct value *value = argument;
    if (!sim_task_cancelled()) __atomic_store_n(value->address, value->value, __ATOMIC_RELEASE);
    free(value);
    return 0;
}

static int run_value_wait(void *argument) {
    struct value *value = argument;
    /* Anything may write the value, another process too: there is nothing to be woken by. */
    while (!holds(value) && !sim_task_cancelled()) nanosleep(&(struct timespec){0, 200000}, NULL);
    free(value);
    return 0;
}

static int submit_value(const char *call, void *address, uint64_t wanted, uint32_t flag, sim_task run, bool at_once,
                        aclrtStream handle) {
    SIM_TRACE(call, "\"address\": \"%p\", \"value\": %llu", address, (unsigned long long)wanted);
    if (!address || (uintptr_t)address % sizeof(uint64_t))
        return sim_fail(ACL_ERROR_RT_ADDR_UNALIGNED, "%s: %p is not aligned to 8 bytes", call, address);
    int error = sim_stream_check(handle);
    if (error) return error;
    struct value *value = malloc(sizeof *value);
    if (!value) return sim_fail(ACL_ERROR_RT_RESOURCE_ALLOC_FAIL, "%s: the host has no memory", call);
    *value = (struct value){address, wanted, flag};
    if (sim_stream_idle(handle) && (at_once || holds(value))) return run(value);
    return sim_stream_submit(handle, call, run, value);
}

EXPORT aclError aclrtValueWrite(void *address, uint64_t value, uint32_t flag, aclrtStream stream) {
    return submit_value("aclrtValueWrite", address, value, flag, run_value_write, true, stream);
}

EXPORT aclError aclrtValueWait(void *address, uint64_t value, uint32_t flag, aclrtStream stream) {
    if (flag > ACL_STREAM_WAIT_VALUE_NOR) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtValueWait: flag %u", flag);
    return submit_value("aclrtValueWait", address, value, flag, run_value_wait, false, stream);
}
