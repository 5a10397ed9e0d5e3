/* Communicators of the simulated HCCL: creation, rendezvous, waiting, failure, destruction.
 *
 * The shared memory is a memfd, reached by the other ranks as /proc/PID/fd/N: it has no name, so nothing is left behind
 * however its processes end. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "hccl_sim.h"

_Static_assert(sizeof(HcclCommConfig) == 2240, "layout of HcclCommConfig, version 10");

#define SEGMENT_MAGIC UINT64_C(0x6e70752d73696d31)
/* Tasks that still wait when their communicator is destroyed get this long. */
static const double DESTROY_GRACE = 5.0;
/* A cancelled task, a destroyed communicator and a time-out are noticed this often. */
static const double SLICE = 0.02;

struct root_info {
    uint64_t magic, id, start;
    uint32_t pid;
    int32_t fd;
    char host[65];
};

_Static_assert(sizeof(struct root_info) <= sizeof(HcclRootInfo), "HcclRootInfo holds what the ranks need");

static void futex_wait(_Atomic uint32_t *word, uint32_t seen, double seconds) {
    struct timespec time = {.tv_sec = (time_t)seconds, .tv_nsec = (long)((seconds - (double)(time_t)seconds) * 1e9)};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &time, NULL, 0);
}

void comm_wake(_Atomic uint32_t *word) {
    atomic_fetch_add(word, 1);
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static double seconds_setting(const char *name, double otherwise) {
    const char *text = getenv(name);
    char *end;
    double value = text && *text ? strtod(text, &end) : otherwise;
    return text && *text && (*end || !(value >= 0)) ? otherwise : value;
}

static uint64_t random_id(void) {
    uint64_t id;
    if (getrandom(&id, sizeof id, 0) != sizeof id)
        id = (uint64_t)getpid() << 32 ^ (uint64_t)(sim_now() * 1e9);
    return id;
}

/* Start time of a process in clock ticks; 0 if it is gone (or only waits to be reaped). */
static uint64_t process_start(uint32_t pid) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[length > 0 ? length : 0] = 0;
    const char *field = strrchr(text, ')');    /* the command's name may hold spaces and parentheses */
    if (!field || field[1] != ' ' || field[2] == 'Z' || field[2] == 'X')
        return 0;
    field += 2;
    for (int number = 3; field && number < 22; number++)
        field = (field = strchr(field, ' ')) ? field + 1 : NULL;
    return field ? strtoull(field, NULL, 10) : 0;
}

static bool process_gone(const struct rank_state *state) {
    return process_start(state->pid) != state->start;
}

bool comm_name_ranks(const struct segment *s, const bool *missing, uint32_t ranks, char *text, size_t size) {
    bool gone = false;
    size_t used = 0;
    *text = 0;
    for (uint32_t rank = 0; rank < ranks && used + 64 < size; rank++) {
        if (!missing[rank])
            continue;
        used += (size_t)snprintf(text + used, size - used, "%s%u", used ? ", " : "", rank);
        if (s->rank[rank].pid && process_gone(&s->rank[rank])) {
            gone = true;
            used += (size_t)snprintf(text + used, size - used, " (its process %u is gone)", s->rank[rank].pid);
        }
    }
    return gone;
}

void comm_retain(struct comm *c) {
    atomic_fetch_add(&c->references, 1);
}

void comm_release(struct comm *c) {
    if (atomic_fetch_sub(&c->references, 1) != 1)
        return;
    munmap(c->shared, c->bytes);
    pthread_mutex_destroy(&c->lock);
    free(c);
}

void comm_ring_doorbell(struct comm *c, uint32_t rank) {
    comm_wake(&c->shared->rank[rank].doorbell);
}

int comm_wait(struct comm *c, _Atomic uint32_t *word, uint32_t seen, double since, double longest) {
    for (int i = 0; i < c->spins; i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != seen)
            return 0;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    if (sim_task_cancelled())
        return sim_fail(ACL_ERROR_RT_STREAM_ABORT, "HCCL communicator %s: the stream was destroyed", c->name);
    if (atomic_load(&c->async_error))
        return ACL_ERROR_RT_FFTS_PLUS_TIMEOUT;
    double now = sim_now(), destroyed = atomic_load(&c->destroyed_at);
    if (destroyed > 0 && now - destroyed > DESTROY_GRACE)
        return sim_fail(ACL_ERROR_RT_STREAM_ABORT,
                        "HCCL communicator %s was destroyed while an operation waited for other ranks", c->name);
    if (c->exec_timeout > 0 && now - since > c->exec_timeout)
        return ACL_ERROR_RT_FFTS_PLUS_TIMEOUT;
    futex_wait(word, seen, longest > 0 && longest < SLICE ? longest : SLICE);
    return 0;
}

int comm_fail(struct comm *c, HcclResult result, int code, const char *format, ...) {
    char message[sizeof c->message];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&c->lock);
    bool first = !c->async_error;
    if (first) {
        memcpy(c->message, message, sizeof message);
        atomic_store(&c->async_error, result);
    } else {
        memcpy(message, c->message, sizeof message);
    }
    pthread_mutex_unlock(&c->lock);
    if (first && result != HCCL_E_INTERNAL)
        fprintf(stderr, "%s\n", message);
    if (first)
        comm_ring_doorbell(c, c->rank);
    return sim_fail(code, "%s", message);
}

/* A segment with nothing but its identity; the ranks enlarge it once their number is known. -1 and errno on failure. */
static int create_segment(uint64_t id, uint64_t key) {
    int fd = memfd_create("npu-sim-hccl", MFD_CLOEXEC);
    uint64_t head[3] = {SEGMENT_MAGIC, id, key};
    if (fd >= 0 && pwrite(fd, head, sizeof head, 0) != sizeof head) {
        close(fd);
        return -1;
    }
    return fd;
}

static size_t segment_bytes(uint32_t ranks) {
    size_t pairs = (size_t)ranks * ranks;
    return sizeof(struct segment) + ranks * 2 * (size_t)SLOT_BYTES + 4 * sizeof(uint64_t) * pairs + 64 +
           pairs * (sizeof(struct ring) + (size_t)RING_DEPTH * RING_BYTES);
}

/* Become rank `rank` of the segment behind fd. HCCL_E_UNAVAIL: another has that rank. */
static HcclResult join(int fd, uint64_t id, uint64_t key, uint32_t ranks, uint32_t rank, const HcclCommConfig *config,
                       struct comm **result) {
    uint64_t head[3] = {0};
    if (pread(fd, head, sizeof head, 0) != sizeof head || head[0] != SEGMENT_MAGIC || head[1] != id || head[2] != key)
        return HCCL_E_OPEN_FILE_FAILURE;
    size_t bytes = segment_bytes(ranks);
    /* Writing the last byte can only enlarge the file, whichever rank comes first; truncation could also shrink it. */
    if (pwrite(fd, "", 1, (off_t)bytes - 1) != 1)
        return sim_fail(HCCL_E_MEMORY, "HCCL: no shared memory of %zu bytes: %s", bytes, strerror(errno));
    struct comm *c = calloc(1, sizeof *c);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (!c || memory == MAP_FAILED) {
        free(c);
        return sim_fail(HCCL_E_MEMORY, "HCCL: cannot map shared memory of %zu bytes: %s", bytes, strerror(errno));
    }
    *c = (struct comm){.shared = memory, .bytes = bytes, .rank = rank, .ranks = ranks};
    atomic_store(&c->references, 1);
    pthread_mutex_init(&c->lock, NULL);
    c->exec_timeout = seconds_setting("HCCL_EXEC_TIMEOUT", 1836);
    if (config && config->info.size > offsetof(HcclCommConfig, exec_timeout) && config->exec_timeout >= 0)
        c->exec_timeout = config->exec_timeout;
    if (config && config->info.size > offsetof(HcclCommConfig, comm_name) && config->comm_name[0])
        snprintf(c->name, sizeof c->name, "%.127s", config->comm_name);
    else
        snprintf(c->name, sizeof c->name, "hccl_sim_%016llx", (unsigned long long)id);
    cpu_set_t cpus;
    bool crowded = sched_getaffinity(0, sizeof cpus, &cpus) || (uint32_t)CPU_COUNT(&cpus) < ranks;
    c->spins = crowded ? 50 : 3000;

    struct segment *s = c->shared;
    uint32_t told = 0, free_pid = 0;
    if (!atomic_compare_exchange_strong(&s->ranks, &told, ranks) && told != ranks) {
        comm_release(c);
        return sim_fail(HCCL_E_PARA, "HCCL: rank %u was told of %u ranks, another rank of %u", rank, ranks, told);
    }
    if (!atomic_compare_exchange_strong(&s->rank[rank].pid, &free_pid, (uint32_t)getpid())) {
        comm_release(c);
        return HCCL_E_UNAVAIL;
    }
    s->rank[rank].start = process_start((uint32_t)getpid());
    comm_wake(&s->joined);
    *result = c;
    return HCCL_SUCCESS;
}

/* Wait until all ranks have joined. On failure the communicator is released. */
static HcclResult await_ranks(struct comm *c, double deadline) {
    struct segment *s = c->shared;
    for (uint32_t seen; (seen = atomic_load(&s->joined)) < c->ranks;) {
        if (sim_now() > deadline) {
            bool missing[MAX_RANKS];
            char text[512], name[HCCL_NAME_LENGTH];
            for (uint32_t rank = 0; rank < c->ranks; rank++)
                missing[rank] = !s->rank[rank].pid;
            comm_name_ranks(s, missing, c->ranks, text, sizeof text);
            uint32_t rank = c->rank, ranks = c->ranks;
            memcpy(name, c->name, sizeof name);
            comm_release(c);
            return sim_fail(HCCL_E_TIMEOUT, "EI0006: HCCL communicator %s: rank %u of %u waited in vain for rank(s) %s "
                            "to join it (HCCL_CONNECT_TIMEOUT)", name, rank, ranks, text);
        }
        futex_wait(&s->joined, seen, SLICE);
    }
    return HCCL_SUCCESS;
}

/* The identity tells apart communicators that were given the same name, such as torch_npu's of disjoint groups. */
static void trace_new(const char *call, const struct comm *c, const char *parent) {
    SIM_TRACE(call, "\"comm\": \"%s\", \"id\": \"%016llx\", \"parent\": \"%s\", \"rank\": %u, \"ranks\": %u", c->name,
              (unsigned long long)c->shared->id, parent, c->rank, c->ranks);
}

static double connect_deadline(void) {
    return sim_now() + seconds_setting("HCCL_CONNECT_TIMEOUT", 120);
}

static HcclResult check_config(const HcclCommConfig *config) {
    if (config && config->info.magic != HCCL_CONFIG_MAGIC)
        return sim_fail(HCCL_E_PARA, "HCCL: HcclCommConfig was not initialised by HcclCommConfigInit");
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetRootInfo(HcclRootInfo *root_info) {
    if (!root_info)
        return sim_fail(HCCL_E_PTR, "HcclGetRootInfo: rootInfo is NULL");
    struct root_info root = {.magic = SEGMENT_MAGIC, .id = random_id(), .pid = (uint32_t)getpid()};
    root.start = process_start(root.pid);
    root.fd = create_segment(root.id, 0);
    if (root.fd < 0)
        return sim_fail(HCCL_E_MEMORY, "HcclGetRootInfo: no shared memory: %s", strerror(errno));
    struct utsname host;
    if (uname(&host) == 0)
        snprintf(root.host, sizeof root.host, "%.64s", host.nodename);
    memset(root_info, 0, sizeof *root_info);
    memcpy(root_info, &root, sizeof root);
    SIM_TRACE("HcclGetRootInfo", "\"id\": \"%016llx\"", (unsigned long long)root.id);
    return HCCL_SUCCESS;
}

static int open_descriptor(uint32_t pid, int fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/fd/%d", pid, fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

static HcclResult no_access(const struct root_info *root, const char *reason) {
    struct utsname host = {0};
    uname(&host);
    if (strncmp(host.nodename, root->host, sizeof root->host - 1) != 0)
        return sim_fail(HCCL_E_OPEN_FILE_FAILURE, "HCCL: the root's process %u runs on host %s, this rank on host %s; "
                        "the simulated devices of one job must be on one machine", root->pid, root->host,
                        host.nodename);
    return sim_fail(HCCL_E_OPEN_FILE_FAILURE, "HCCL: no access to the shared memory of the root's process %u (%s): it "
                    "has ended, or is in another container or of another user; the simulated devices of one job must "
                    "be on one machine, in one container, of one user", root->pid, reason);
}

EXPORT HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo *root_info, uint32_t rank,
                                             const HcclCommConfig *config, struct comm **result) {
    struct root_info root;
    if (!root_info || !result)
        return sim_fail(HCCL_E_PTR, "HcclCommInitRootInfo: rootInfo or comm is NULL");
    memcpy(&root, root_info, sizeof root);
    if (root.magic != SEGMENT_MAGIC)
        return sim_fail(HCCL_E_PARA, "HcclCommInitRootInfo: rootInfo is none of a simulated device");
    if (!ranks || ranks > MAX_RANKS || rank >= ranks)
        return sim_fail(HCCL_E_PARA, "HcclCommInitRootInfo: rank %u of %u (at most %d ranks)", rank, ranks, MAX_RANKS);
    HcclResult status = check_config(config);
    if (status)
        return status;
    double deadline = connect_deadline();
    int fd = open_descriptor(root.pid, root.fd);
    if (fd < 0)
        return no_access(&root, strerror(errno));
    struct comm *c;
    status = join(fd, root.id, 0, ranks, rank, config, &c);
    close(fd);
    if (status == HCCL_E_OPEN_FILE_FAILURE) {
        bool alive = process_start(root.pid) == root.start;
        return no_access(&root, alive ? "it was closed" : "another process has its number");
    }
    if (status == HCCL_E_UNAVAIL)
        return sim_fail(HCCL_E_PARA, "HcclCommInitRootInfo: two processes call themselves rank %u", rank);
    if (status)
        return status;
    bool owner = root.pid == (uint32_t)getpid() && !atomic_exchange(&c->shared->descriptor_closed, 1);
    status = await_ranks(c, deadline);
    if (owner)
        close(root.fd);
    if (status)
        return status;
    *result = c;
    trace_new("HcclCommInitRootInfo", c, "");
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo *root_info, uint32_t rank,
                                       struct comm **result) {
    return HcclCommInitRootInfoConfig(ranks, root_info, rank, NULL, result);
}

EXPORT HcclResult HcclCommInitAll(uint32_t number, int32_t *devices, struct comm **result) {
    if (!devices || !result)
        return sim_fail(HCCL_E_PTR, "HcclCommInitAll: devices or comms is NULL");
    if (!number || number > MAX_RANKS)
        return sim_fail(HCCL_E_PARA, "HcclCommInitAll: %u devices (at most %d)", number, MAX_RANKS);
    uint64_t id = random_id();
    int fd = create_segment(id, 0);
    if (fd < 0)
        return sim_fail(HCCL_E_MEMORY, "HcclCommInitAll: no shared memory: %s", strerror(errno));
    HcclResult status = HCCL_SUCCESS;
    uint32_t rank = 0;
    for (; rank < number && !status; rank++)
        status = join(fd, id, 0, number, rank, NULL, &result[rank]);
    close(fd);
    if (status) {
        for (uint32_t i = 0; i + 1 < rank; i++)
            comm_release(result[i]);
        return status;
    }
    for (rank = 0; rank < number; rank++)
        trace_new("HcclCommInitAll", result[rank], "");
    return HCCL_SUCCESS;
}

static uint64_t mix(uint64_t hash, uint64_t value) {
    hash = (hash ^ value) * UINT64_C(0x9e3779b97f4a7c15);
    return hash ^ hash >> 29;
}

/* The member that comes first in the list makes the segment and says where in the parent's table. */
static HcclResult create_sub(struct comm *parent, uint64_t key, uint32_t ranks, const HcclCommConfig *config,
                             double deadline, struct comm **result) {
    struct segment *table = parent->shared;
    struct sub_entry *entry = NULL;
    while (!entry) {
        uint32_t seen = atomic_load(&table->table_changed);
        for (int i = 0; i < SUB_ENTRIES && !entry; i++) {
            uint32_t unused = 0;
            if (atomic_compare_exchange_strong(&table->sub[i].state, &unused, 1))
                entry = &table->sub[i];
        }
        if (entry)
            break;
        if (sim_now() > deadline)
            return sim_fail(HCCL_E_TIMEOUT, "HcclCreateSubCommConfig: %d sub-communicators of %s wait for members",
                            SUB_ENTRIES, parent->name);
        futex_wait(&table->table_changed, seen, SLICE);
    }
    uint64_t id = random_id();
    int fd = create_segment(id, key);
    HcclResult status;
    if (fd < 0)
        status = sim_fail(HCCL_E_MEMORY, "HcclCreateSubCommConfig: no shared memory: %s", strerror(errno));
    else
        status = join(fd, id, key, ranks, 0, config, result);
    if (!status) {
        entry->fd = fd;
        entry->pid = (uint32_t)getpid();
        entry->key = key;
        entry->id = id;
        atomic_store(&entry->state, 2);
        comm_wake(&table->table_changed);
        status = await_ranks(*result, deadline);
    }
    atomic_store(&entry->state, 0);
    comm_wake(&table->table_changed);
    if (fd >= 0)
        close(fd);
    return status;
}

static HcclResult join_sub(struct comm *parent, uint64_t key, uint32_t ranks, uint32_t rank,
                           const HcclCommConfig *config, double deadline, uint32_t creator, struct comm **result) {
    struct segment *table = parent->shared;
    for (;;) {
        uint32_t seen = atomic_load(&table->table_changed);
        for (int i = 0; i < SUB_ENTRIES; i++) {
            struct sub_entry *entry = &table->sub[i];
            if (atomic_load(&entry->state) != 2 || entry->key != key)
                continue;
            uint64_t id = entry->id;
            int fd = open_descriptor(entry->pid, entry->fd);
            if (fd < 0)
                continue;
            /* The entry may have been given up meanwhile, or be an earlier group of the same members: look again. */
            HcclResult status = join(fd, id, key, ranks, rank, config, result);
            close(fd);
            if (status == HCCL_SUCCESS)
                return await_ranks(*result, deadline);
            if (status != HCCL_E_UNAVAIL && status != HCCL_E_OPEN_FILE_FAILURE)
                return status;
        }
        if (sim_now() > deadline)
            return sim_fail(HCCL_E_TIMEOUT, "EI0006: HcclCreateSubCommConfig: rank %u of communicator %s waited in "
                            "vain for rank %u, the first of the sub-communicator's %u ranks (HCCL_CONNECT_TIMEOUT)",
                            parent->rank, parent->name, creator, ranks);
        futex_wait(&table->table_changed, seen, SLICE);
    }
}

EXPORT HcclResult HcclCreateSubCommConfig(struct comm **parent, uint32_t ranks, uint32_t *rank_ids, uint64_t sub_id,
                                          uint32_t rank, HcclCommConfig *config, struct comm **result) {
    if (!parent || !*parent || !result)
        return sim_fail(HCCL_E_PTR, "HcclCreateSubCommConfig: comm or subComm is NULL");
    struct comm *p = *parent;
    if (!rank_ids && sub_id == 0xffffffff) {    /* how a rank says that it is no member */
        *result = NULL;
        return HCCL_SUCCESS;
    }
    if (!rank_ids)
        return sim_fail(HCCL_E_PTR, "HcclCreateSubCommConfig: rankIds is NULL");
    if (!ranks || ranks > p->ranks || rank >= ranks || rank_ids[rank] != p->rank)
        return sim_fail(HCCL_E_PARA, "HcclCreateSubCommConfig: rank %u of %u in rankIds is not rank %u of communicator "
                        "%s", rank, ranks, p->rank, p->name);
    HcclResult status = check_config(config);
    if (status)
        return status;
    uint64_t key = mix(mix(1, sub_id), ranks);
    for (uint32_t i = 0; i < ranks; i++) {
        if (rank_ids[i] >= p->ranks)
            return sim_fail(HCCL_E_PARA, "HcclCreateSubCommConfig: rank %u in rankIds; communicator %s has %u ranks",
                            rank_ids[i], p->name, p->ranks);
        key = mix(key, rank_ids[i]);
    }
    double deadline = connect_deadline();
    status = rank == 0 ? create_sub(p, key, ranks, config, deadline, result)
                       : join_sub(p, key, ranks, rank, config, deadline, rank_ids[0], result);
    if (!status)
        trace_new("HcclCreateSubCommConfig", *result, p->name);
    return status;
}

EXPORT HcclResult HcclCommDestroy(struct comm *c) {
    if (!c)
        return sim_fail(HCCL_E_PTR, "HcclCommDestroy: comm is NULL");
    SIM_TRACE("HcclCommDestroy", "\"comm\": \"%s\", \"rank\": %u, \"ranks\": %u", c->name, c->rank, c->ranks);
    atomic_store(&c->destroyed_at, sim_now());
    comm_release(c);
    return HCCL_SUCCESS;
}
