/* HCCL among the processes of one machine: what hccl.c (operations), hccl_comm.c (communicators, waiting) and
 * hccl_reduce.c (arithmetic) share.
 *
 * A communicator is a memfd that its ranks map. Collectives move data in chunks through one slot per rank; each rank
 * writes its slot, all meet at a barrier, each reads what it needs. Slots come in pairs used in turn, so a rank can
 * write the next chunk while another still reads the last: whoever writes a slot for the second time has passed a
 * barrier that every reader of the first writing reached after reading. Point-to-point messages have a ring per ordered
 * pair of ranks. */
#ifndef NPU_SIM_HCCL_H
#define NPU_SIM_HCCL_H

#include <pthread.h>
#include <stdatomic.h>

#include "sim.h"

/* HCCL's own headers need C++; these are the parts of hccl_types.h that cross the interface. */
typedef enum {
    HCCL_SUCCESS = 0, HCCL_E_PARA = 1, HCCL_E_PTR = 2, HCCL_E_MEMORY = 3, HCCL_E_INTERNAL = 4, HCCL_E_NOT_SUPPORT = 5,
    HCCL_E_UNAVAIL = 7, HCCL_E_SYSCALL = 8, HCCL_E_TIMEOUT = 9, HCCL_E_OPEN_FILE_FAILURE = 10, HCCL_E_RUNTIME = 15,
    HCCL_E_REMOTE = 21, HCCL_E_RESERVED = 25,
} HcclResult;

typedef enum {
    HCCL_REDUCE_SUM, HCCL_REDUCE_PROD, HCCL_REDUCE_MAX, HCCL_REDUCE_MIN, HCCL_REDUCE_NONE = 255,
} HcclReduceOp;

typedef enum {
    HCCL_INT8, HCCL_INT16, HCCL_INT32, HCCL_FP16, HCCL_FP32, HCCL_INT64, HCCL_UINT64, HCCL_UINT8, HCCL_UINT16,
    HCCL_UINT32, HCCL_FP64, HCCL_BFP16, HCCL_INT128, HCCL_HIF8 = 14, HCCL_FP8E4M3, HCCL_FP8E5M2, HCCL_FP8E8M0,
} HcclDataType;

typedef struct { char internal[4108]; } HcclRootInfo;

typedef struct {
    struct { size_t size; uint32_t magic, version; uint64_t reserved; } info;
    uint32_t buffer_size, deterministic;
    char comm_name[128], udi[128];
    uint32_t op_expansion_mode, traffic_class, service_level, world_rank;
    uint64_t job;
    uint8_t zero_copy;
    int32_t exec_timeout;
    char algorithm[1600], retry_enable[50], retry_params[128], buffer_name[128];
    uint32_t qos;
    uint64_t window_size;
} HcclCommConfig;

enum { HCCL_CONFIG_MAGIC = 0xf0f0f0f0, HCCL_CONFIG_CAPABILITY = 12, HCCL_NAME_LENGTH = 128 };

/* The largest communicator; the ring of every pair of ranks is reserved (not committed) in the segment. */
enum { MAX_RANKS = 128 };
enum { SLOT_BYTES = 512 * 1024, RING_DEPTH = 4, RING_BYTES = 64 * 1024, SUB_ENTRIES = 64 };

typedef enum {
    OP_ALL_REDUCE, OP_ALL_GATHER, OP_ALL_GATHER_V, OP_REDUCE_SCATTER, OP_REDUCE_SCATTER_V, OP_BROADCAST, OP_REDUCE,
    OP_SCATTER, OP_ALL_TO_ALL, OP_ALL_TO_ALL_V, OP_ALL_TO_ALL_VC, OP_BARRIER, OP_SEND, OP_RECV, OP_BATCH,
} hccl_op;

/* What a rank says about its operation; the ranks of a communicator must say the same. */
struct description {
    uint32_t op, type, reduce, root;
    uint64_t count, counts_hash;
};

/* Written by one rank, read by all. */
struct rank_state {
    _Atomic uint32_t pid;                 /* 0 until the rank has joined */
    _Atomic uint32_t doorbell;            /* futex: something that this rank may wait for has changed */
    uint64_t start;                       /* start time of the process: tells it from a later one with its number */
    _Atomic uint64_t step;                /* barriers that the rank has reached */
    struct description description[2];
} __attribute__((aligned(128)));

struct ring {
    _Atomic uint64_t head __attribute__((aligned(64)));    /* chunks written */
    _Atomic uint64_t tail __attribute__((aligned(64)));    /* chunks read */
    struct { uint64_t total, bytes; } chunk[RING_DEPTH];
};

/* Where a sub-communicator that is being created can be found. */
struct sub_entry {
    _Atomic uint32_t state;               /* 0 free, 1 being written, 2 published */
    int32_t fd;
    uint32_t pid;
    uint64_t key, id;
};

struct segment {
    uint64_t magic, id, key;
    _Atomic uint32_t ranks;               /* 0 until the first rank has joined */
    _Atomic uint32_t joined;              /* futex: ranks that have joined */
    _Atomic uint32_t descriptor_closed;
    _Atomic uint32_t mismatch_said;
    _Atomic uint32_t table_changed;       /* futex */
    _Atomic uint32_t arrived __attribute__((aligned(64)));
    _Atomic uint32_t generation __attribute__((aligned(64)));   /* futex: barriers completed */
    struct sub_entry sub[SUB_ENTRIES];
    struct rank_state rank[MAX_RANKS];
};

/* Operations of one lane run in the order of their calls. A communicator has a lane for its collectives and one for
 * each peer and direction of point-to-point messages. */
struct lane { uint64_t submitted; _Atomic uint64_t done; };

struct comm {
    struct segment *shared;
    size_t bytes;
    uint32_t rank, ranks;
    char name[HCCL_NAME_LENGTH];
    double exec_timeout;                  /* seconds; 0: none */
    int spins;                            /* polls before a waiter sleeps */
    atomic_int references;                /* the handle and each task */
    _Atomic double destroyed_at;          /* 0 while the handle is alive */
    uint64_t steps, chunks, collectives;  /* touched by the running collective only */
    pthread_mutex_t lock;                 /* of the message */
    _Atomic int async_error;
    char message[1024];
    struct lane collective, send[MAX_RANKS], recv[MAX_RANKS];
};

static inline char *comm_slot(const struct comm *c, uint32_t rank, uint64_t parity) {
    return (char *)c->shared + sizeof(struct segment) + (rank * 2 + parity) * (size_t)SLOT_BYTES;
}

/* The bytes that rank `from` sends to rank `to` in an all-to-all, as the sender (side 0) or receiver (side 1) says. */
static inline uint64_t *comm_pair_bytes(const struct comm *c, uint64_t parity, int side, uint32_t from, uint32_t to) {
    uint64_t *base = (uint64_t *)comm_slot(c, c->ranks, 0);
    return base + (((parity * 2 + (uint64_t)side) * c->ranks + from) * c->ranks + to);
}

static inline struct ring *comm_ring(const struct comm *c, uint32_t from, uint32_t to) {
    char *base = (char *)comm_pair_bytes(c, 2, 0, 0, 0);
    base += -(uintptr_t)base & 63;
    return (struct ring *)(base + (from * c->ranks + to) * (sizeof(struct ring) + (size_t)RING_DEPTH * RING_BYTES));
}

static inline char *ring_data(struct ring *ring, uint64_t chunk) {
    return (char *)(ring + 1) + chunk % RING_DEPTH * (size_t)RING_BYTES;
}

/* hccl_comm.c */
void comm_retain(struct comm *c);
void comm_release(struct comm *c);
/* Change a word that others wait for and wake them. */
void comm_wake(_Atomic uint32_t *word);
/* Ring the rank's doorbell: in this process for a change of a lane, in the peer's for a change of a ring. */
void comm_ring_doorbell(struct comm *c, uint32_t rank);
/* Wait until *word is no longer `seen`, until something else may have changed (0: look again), or until the task must
 * stop: cancelled, communicator destroyed or failed, or no change since `since` for longer than the time-out. Then the
 * result is an aclError other than 0; for ACL_ERROR_RT_FFTS_PLUS_TIMEOUT, the time-out, the caller says who is missing.
 * A wait lasts no longer than `longest` seconds where that is not 0. */
int comm_wait(struct comm *c, _Atomic uint32_t *word, uint32_t seen, double since, double longest);
/* Write "2 (its process 71 is gone), 3" for the ranks that `missing` marks; true if one of their processes is gone. */
bool comm_name_ranks(const struct segment *s, const bool *missing, uint32_t ranks, char *text, size_t size);
/* The operation has failed and with it the communicator: remember why for HcclGetCommAsyncError, and print it unless
 * the result is HCCL_E_INTERNAL (given up, not failed). If the communicator had failed before, the first reason
 * stands. */
int comm_fail(struct comm *c, HcclResult result, int code, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* hccl_reduce.c */
size_t hccl_type_bytes(int type);         /* 0 for what is no data type */
const char *hccl_type_name(int type);
const char *hccl_reduce_name(int op);
bool hccl_can_reduce(int type, int op);
/* target[i] = source[0][i] op source[1][i] op ...; target may be one of the sources. */
void hccl_reduce(void *target, const void *const *sources, uint32_t number, size_t count, int type, int op);

#endif
