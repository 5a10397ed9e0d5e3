/* Operations of the simulated HCCL. A call checks its arguments and puts a task into the stream; the task meets those
 * of the other ranks in shared memory (hccl_sim.h). */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hccl_sim.h"

/* Up to this size every rank combines everything itself, which saves a barrier; above it each combines a share. */
enum { SMALL_REDUCE = 16 * 1024 };

static const char *const OP_NAMES[] = {
    [OP_ALL_REDUCE] = "HcclAllReduce", [OP_ALL_GATHER] = "HcclAllGather", [OP_ALL_GATHER_V] = "HcclAllGatherV",
    [OP_REDUCE_SCATTER] = "HcclReduceScatter", [OP_REDUCE_SCATTER_V] = "HcclReduceScatterV",
    [OP_BROADCAST] = "HcclBroadcast", [OP_REDUCE] = "HcclReduce", [OP_SCATTER] = "HcclScatter",
    [OP_ALL_TO_ALL] = "HcclAlltoAll", [OP_ALL_TO_ALL_V] = "HcclAlltoAllV", [OP_ALL_TO_ALL_VC] = "HcclAlltoAllVC",
    [OP_BARRIER] = "HcclBarrier", [OP_SEND] = "HcclSend", [OP_RECV] = "HcclRecv", [OP_BATCH] = "HcclBatchSendRecv",
};

enum { NO_ROOT = UINT32_MAX };

struct extent { uint64_t bytes, offset; };

/* A collective in a stream. What goes to and comes from each rank is in bytes. */
struct task {
    struct comm *c;
    struct description d;
    uint64_t ticket;
    const char *from;
    char *to;
    uint64_t bytes;                       /* of this rank's buffer; see the trace */
    uint64_t largest;                     /* the largest extent of any rank, where this rank can know it */
    struct extent send[MAX_RANKS], recv[MAX_RANKS];
};

/* A point-to-point message. */
struct item {
    struct comm *c;
    aclrtStream stream;
    hccl_op kind;                         /* OP_SEND or OP_RECV */
    uint32_t peer;
    char *buffer;
    uint64_t bytes, moved, end, ticket;
    bool begun, done, mismatch;
};

struct batch { size_t number; struct item item[]; };

/* Tickets are drawn in the order in which tasks enter the streams. */
static pthread_mutex_t submission = PTHREAD_MUTEX_INITIALIZER;

static __thread struct { int depth; size_t number, room; struct item *item; } group;

static void describe(const struct description *d, char *text, size_t size) {
    int used = snprintf(text, size, "%s(", OP_NAMES[d->op]);
    if (d->op != OP_BARRIER)
        used += snprintf(text + used, size - (size_t)used, "count %llu, %s", (unsigned long long)d->count,
                         hccl_type_name((int)d->type));
    if (d->reduce != HCCL_REDUCE_NONE)
        used += snprintf(text + used, size - (size_t)used, ", %s", hccl_reduce_name((int)d->reduce));
    if (d->root != NO_ROOT)
        used += snprintf(text + used, size - (size_t)used, ", root %u", d->root);
    if (d->counts_hash)
        used += snprintf(text + used, size - (size_t)used, ", counts %04x", (unsigned)(d->counts_hash & 0xffff));
    snprintf(text + used, size - (size_t)used, ")");
}

/* ---- collectives, in the stream ---------------------------------------------------------------------------------- */

/* Whether the trace is to say what an operation waits for: once, when that has lasted a second. */
static bool wait_is_long(double since, bool *said) {
    if (*said || !sim_tracing || sim_now() - since < 1)
        return false;
    return *said = true;
}

static void trace_wait(struct comm *c, const char *what, const bool *missing) {
    char who[512];
    comm_name_ranks(c->shared, missing, c->ranks, who, sizeof who);
    SIM_TRACE("waits", "\"operation\": \"%s\", \"communicator\": \"%s\", \"rank\": %u, \"for_ranks\": \"%s\"", what,
              c->name, c->rank, who);
}

static int barrier(struct task *t) {
    struct comm *c = t->c;
    struct segment *s = c->shared;
    uint64_t mine = ++c->steps;
    atomic_store(&s->rank[c->rank].step, mine);
    uint32_t generation = atomic_load(&s->generation);
    if (atomic_fetch_add(&s->arrived, 1) + 1 == c->ranks) {
        atomic_store(&s->arrived, 0);
        comm_wake(&s->generation);
        return 0;
    }
    double since = sim_now();
    bool said = false;
    while (atomic_load(&s->generation) == generation) {
        int code = comm_wait(c, &s->generation, generation, since, 0);
        bool late = code == ACL_ERROR_RT_FFTS_PLUS_TIMEOUT;
        if (late || wait_is_long(since, &said)) {
            bool missing[MAX_RANKS];
            char what[256], who[512];
            for (uint32_t rank = 0; rank < c->ranks; rank++)
                missing[rank] = atomic_load(&s->rank[rank].step) < mine;
            describe(&t->d, what, sizeof what);
            if (!late) {
                trace_wait(c, what, missing);
                continue;
            }
            bool gone = comm_name_ranks(s, missing, c->ranks, who, sizeof who);
            return comm_fail(c, gone ? HCCL_E_REMOTE : HCCL_E_TIMEOUT, code,
                             "EI0002: HCCL communicator %s: rank %u of %u timed out in operation %llu, %s, after %g s: "
                             "no sign of rank(s) %s", c->name, c->rank, c->ranks, (unsigned long long)c->collectives,
                             what, c->exec_timeout, who);
        }
        if (code)
            return code;
    }
    return 0;
}

/* The ranks disagree. A device would wait for something that never comes; so does the task, until its time-out. */
static int mismatch(struct comm *c, const char *text) {
    if (!atomic_exchange(&c->shared->mismatch_said, 1))
        fprintf(stderr, "HCCL communicator %s: the ranks do not agree: %s\n", c->name, text);
    _Atomic uint32_t *word = &c->shared->rank[c->rank].doorbell;
    double since = sim_now();
    for (;;) {
        int code = comm_wait(c, word, atomic_load(word), since, 0);
        if (code == ACL_ERROR_RT_FFTS_PLUS_TIMEOUT)
            return comm_fail(c, HCCL_E_TIMEOUT, code, "EI0002: HCCL communicator %s: rank %u of %u timed out after %g "
                             "s: the ranks do not agree: %s", c->name, c->rank, c->ranks, c->exec_timeout, text);
        if (code)
            return code;
    }
}

/* All ranks have published their operation: compare. */
static int agree(struct task *t) {
    struct comm *c = t->c;
    struct segment *s = c->shared;
    uint64_t parity = c->collectives & 1;
    char text[768];
    size_t used = 0;
    bool same = true;
    for (uint32_t rank = 0; rank < c->ranks; rank++)
        same &= !memcmp(&s->rank[rank].description[parity], &t->d, sizeof t->d);
    if (!same) {
        used += (size_t)snprintf(text, sizeof text, "operation %llu is", (unsigned long long)c->collectives);
        for (uint32_t rank = 0; rank < c->ranks && used + 200 < sizeof text; rank++) {
            char what[192];
            describe(&s->rank[rank].description[parity], what, sizeof what);
            used += (size_t)snprintf(text + used, sizeof text - used, "%s %s on rank %u", rank ? "," : "", what, rank);
        }
        return mismatch(c, text);
    }
    if (t->d.op != OP_ALL_TO_ALL_V)
        return 0;
    for (uint32_t from = 0; from < c->ranks; from++)
        for (uint32_t to = 0; to < c->ranks; to++) {
            uint64_t sent = *comm_pair_bytes(c, parity, 0, from, to);
            uint64_t expected = *comm_pair_bytes(c, parity, 1, from, to);
            if (sent > t->largest)
                t->largest = sent;
            if (sent != expected && used + 100 < sizeof text)
                used += (size_t)snprintf(text + used, sizeof text - used,
                                         "%s rank %u sends %llu bytes to rank %u, which expects %llu",
                                         used ? "," : "in HcclAlltoAllV,", from, (unsigned long long)sent, to,
                                         (unsigned long long)expected);
        }
    return used ? mismatch(c, text) : 0;
}

static void publish(struct task *t) {
    struct comm *c = t->c;
    uint64_t parity = c->collectives & 1;
    c->shared->rank[c->rank].description[parity] = t->d;
    if (t->d.op != OP_ALL_TO_ALL_V)
        return;
    for (uint32_t rank = 0; rank < c->ranks; rank++) {
        *comm_pair_bytes(c, parity, 0, c->rank, rank) = t->send[rank].bytes;
        *comm_pair_bytes(c, parity, 1, rank, c->rank) = t->recv[rank].bytes;
    }
}

/* The other ranks have written their slots. */
static int meet(struct task *t, bool first) {
    int code = barrier(t);
    return code || !first ? code : agree(t);
}

static inline uint64_t part(uint64_t total, uint64_t done, uint64_t most) {
    return total <= done ? 0 : total - done < most ? total - done : most;
}

/* Every rank reads what each rank has to say to all: all-gather, broadcast, barrier. */
static int run_gather(struct task *t) {
    struct comm *c = t->c;
    for (uint64_t done = 0;; done += SLOT_BYTES) {
        uint64_t parity = c->chunks++ & 1;
        const struct extent *mine = &t->send[c->rank];
        if (mine->bytes > done)
            memcpy(comm_slot(c, c->rank, parity), t->from + done, part(mine->bytes, done, SLOT_BYTES));
        int code = meet(t, done == 0);
        if (code)
            return code;
        for (uint32_t rank = 0; rank < c->ranks; rank++) {
            const struct extent *recv = &t->recv[rank];
            if (recv->bytes > done)
                memcpy(t->to + recv->offset + done, comm_slot(c, rank, parity), part(recv->bytes, done, SLOT_BYTES));
        }
        if (done + SLOT_BYTES >= t->largest)
            return 0;
    }
}

/* Every rank reads what each rank has to say to it: all-to-all, scatter, and with a reduction reduce-scatter. */
static int run_exchange(struct task *t) {
    struct comm *c = t->c;
    const uint64_t most = SLOT_BYTES / c->ranks & ~UINT64_C(63);
    for (uint64_t done = 0;; done += most) {
        uint64_t parity = c->chunks++ & 1;
        char *slot = comm_slot(c, c->rank, parity);
        for (uint32_t rank = 0; rank < c->ranks; rank++) {
            const struct extent *send = &t->send[rank];
            if (send->bytes > done)
                memcpy(slot + rank * most, t->from + send->offset + done, part(send->bytes, done, most));
        }
        int code = meet(t, done == 0);
        if (code)
            return code;
        const void *sources[MAX_RANKS];
        for (uint32_t rank = 0; rank < c->ranks; rank++) {
            sources[rank] = comm_slot(c, rank, parity) + c->rank * most;
            if (t->d.reduce == HCCL_REDUCE_NONE && t->recv[rank].bytes > done)
                memcpy(t->to + t->recv[rank].offset + done, sources[rank], part(t->recv[rank].bytes, done, most));
        }
        if (t->d.reduce != HCCL_REDUCE_NONE)
            hccl_reduce(t->to + done, sources, c->ranks,
                        part(t->recv[c->rank].bytes, done, most) / hccl_type_bytes((int)t->d.type), (int)t->d.type,
                        (int)t->d.reduce);
        if (done + most >= t->largest)
            return 0;
    }
}

/* All-reduce, and reduce, whose result only the root takes. */
static int run_reduce(struct task *t) {
    struct comm *c = t->c;
    const size_t size = hccl_type_bytes((int)t->d.type);
    const bool takes = t->d.root == NO_ROOT || t->d.root == c->rank;
    for (uint64_t done = 0;; done += SLOT_BYTES) {
        uint64_t parity = c->chunks++ & 1, length = part(t->bytes, done, SLOT_BYTES);
        if (length)
            memcpy(comm_slot(c, c->rank, parity), t->from + done, length);
        int code = meet(t, done == 0);
        if (code)
            return code;
        uint64_t share = length <= SMALL_REDUCE ? length : (length / c->ranks & ~UINT64_C(63)) + 64;
        uint64_t start = share < length ? c->rank * share : 0;
        const void *sources[MAX_RANKS];
        for (uint32_t rank = 0; rank < c->ranks; rank++)
            sources[rank] = comm_slot(c, rank, parity) + start;
        if (share == length) {
            if (takes)
                hccl_reduce(t->to + done, sources, c->ranks, length / size, (int)t->d.type, (int)t->d.reduce);
        } else {
            /* The share is combined in this rank's slot, in the place that no other rank reads before the barrier. */
            hccl_reduce(comm_slot(c, c->rank, parity) + start, sources, c->ranks, part(length, start, share) / size,
                        (int)t->d.type, (int)t->d.reduce);
            code = barrier(t);
            if (code)
                return code;
            for (uint32_t rank = 0; takes && rank < c->ranks; rank++) {
                start = rank * share;
                if (start < length)
                    memcpy(t->to + done + start, comm_slot(c, rank, parity) + start, part(length, start, share));
            }
        }
        if (done + SLOT_BYTES >= t->bytes)
            return 0;
    }
}

/* Another stream may still run an earlier collective of this communicator. */
static int await_turn(struct comm *c, struct lane *lane, uint64_t ticket) {
    _Atomic uint32_t *word = &c->shared->rank[c->rank].doorbell;
    for (;;) {
        uint32_t seen = atomic_load(word);
        if (atomic_load(&lane->done) == ticket)
            return 0;
        int code = comm_wait(c, word, seen, sim_now(), 0);
        if (code)
            return code;
    }
}

static void finish_lane(struct comm *c, struct lane *lane) {
    atomic_fetch_add(&lane->done, 1);
    if (lane->submitted != lane->done)
        comm_ring_doorbell(c, c->rank);
}

static int run_collective(void *argument) {
    struct task *t = argument;
    struct comm *c = t->c;
    int code = sim_task_cancelled() ? ACL_ERROR_RT_STREAM_ABORT : await_turn(c, &c->collective, t->ticket);
    if (!code && !atomic_load(&c->async_error)) {
        publish(t);
        switch (t->d.op) {
        case OP_ALL_REDUCE:
        case OP_REDUCE:
            code = run_reduce(t);
            break;
        case OP_ALL_GATHER:
        case OP_ALL_GATHER_V:
        case OP_BROADCAST:
        case OP_BARRIER:
            code = run_gather(t);
            break;
        default:
            code = run_exchange(t);
        }
        c->collectives++;
    }
    if (code || atomic_load(&c->async_error))
        code = comm_fail(c, HCCL_E_INTERNAL, code ? code : ACL_ERROR_RT_FFTS_PLUS_TIMEOUT,
                         "HCCL communicator %s: %s of rank %u was given up", c->name, OP_NAMES[t->d.op], c->rank);
    else
        finish_lane(c, &c->collective);
    comm_release(c);
    free(t);
    return code;
}

/* ---- point-to-point, in the stream ------------------------------------------------------------------------------- */

static struct lane *item_lane(const struct item *i) {
    return i->kind == OP_SEND ? &i->c->send[i->peer] : &i->c->recv[i->peer];
}

static bool progress_send(struct item *i, struct ring *ring) {
    uint64_t head = atomic_load(&ring->head), first = head;
    while ((!i->begun || i->moved < i->bytes) && head - atomic_load(&ring->tail) < RING_DEPTH) {
        uint64_t length = part(i->bytes, i->moved, RING_BYTES);
        ring->chunk[head % RING_DEPTH].total = i->bytes;
        ring->chunk[head % RING_DEPTH].bytes = length;
        if (length)
            memcpy(ring_data(ring, head), i->buffer + i->moved, length);
        i->moved += length;
        i->begun = true;
        atomic_store(&ring->head, ++head);
    }
    if (head != first)
        comm_ring_doorbell(i->c, i->peer);
    /* Done once the receiver has it all, as on a device: two ranks that both send first hang here as well. */
    i->done = i->begun && i->moved == i->bytes && atomic_load(&ring->tail) == head;
    return head != first || i->done;
}

static bool progress_recv(struct item *i, struct ring *ring) {
    uint64_t tail = atomic_load(&ring->tail), first = tail;
    while (!i->done && !i->mismatch && atomic_load(&ring->head) != tail) {
        uint64_t total = ring->chunk[tail % RING_DEPTH].total, length = ring->chunk[tail % RING_DEPTH].bytes;
        if (total != i->bytes) {
            i->mismatch = true;
            fprintf(stderr, "HCCL communicator %s: the ranks do not agree: rank %u sends %llu bytes to rank %u, which "
                    "expects %llu\n", i->c->name, i->peer, (unsigned long long)total, i->c->rank,
                    (unsigned long long)i->bytes);
            break;
        }
        if (length)
            memcpy(i->buffer + i->moved, ring_data(ring, tail), length);
        i->moved += length;
        i->done = i->moved == i->bytes;
        atomic_store(&ring->tail, ++tail);
    }
    if (tail != first)
        comm_ring_doorbell(i->c, i->peer);
    return tail != first;
}

static bool has_turn(const struct item *i) {
    return atomic_load(&item_lane(i)->done) == i->ticket;
}

static bool progress(struct item *i) {
    if (i->done || !has_turn(i))
        return false;
    uint32_t mine = i->c->rank;
    bool moved = i->kind == OP_SEND ? progress_send(i, comm_ring(i->c, mine, i->peer))
                                    : progress_recv(i, comm_ring(i->c, i->peer, mine));
    if (i->done)
        finish_lane(i->c, item_lane(i));
    return moved;
}

static int batch_timeout(struct batch *b, int code) {
    int result = code;
    for (size_t n = 0; n < b->number; n++) {
        struct item *i = &b->item[n];
        bool missing[MAX_RANKS] = {false}, mismatched = false;
        char who[512], what[64] = "";
        if (i->done)
            continue;
        for (size_t m = 0; m < b->number; m++) {
            if (b->item[m].c != i->c || b->item[m].done)
                continue;
            missing[b->item[m].peer] = true;
            mismatched |= b->item[m].mismatch;
        }
        bool gone = comm_name_ranks(i->c->shared, missing, i->c->ranks, who, sizeof who);
        if (b->number > 1)
            snprintf(what, sizeof what, " in a batch of %zu messages", b->number);
        result = comm_fail(i->c, gone ? HCCL_E_REMOTE : HCCL_E_TIMEOUT, code,
                           "EI0002: HCCL communicator %s: rank %u of %u timed out in %s%s after %g s: no sign of "
                           "rank(s) %s%s", i->c->name, i->c->rank, i->c->ranks, OP_NAMES[i->kind], what,
                           i->c->exec_timeout, who,
                           mismatched ? " (sender and receiver do not agree on the size)" : "");
    }
    return result;
}

static int run_batch(void *argument) {
    struct batch *b = argument;
    double since = sim_now();
    bool said = false;
    int code = sim_task_cancelled() ? ACL_ERROR_RT_STREAM_ABORT : 0;
    for (size_t n = 0; n < b->number && !code; n++)
        code = atomic_load(&b->item[n].c->async_error) ? ACL_ERROR_RT_FFTS_PLUS_TIMEOUT : 0;
    while (!code) {
        struct item *open = NULL;
        bool moved = false, turn = false, single = true;
        /* A doorbell that rings after it was read here ends the wait below. */
        for (size_t n = 0; n < b->number && !open; n++)
            open = b->item[n].done ? NULL : &b->item[n];
        if (!open)
            break;
        _Atomic uint32_t *word = &open->c->shared->rank[open->c->rank].doorbell;
        uint32_t seen = atomic_load(word);
        for (size_t n = 0; n < b->number; n++) {
            moved |= progress(&b->item[n]);
            turn |= !b->item[n].done && has_turn(&b->item[n]);
            single &= b->item[n].c == open->c;
        }
        if (moved || !turn)
            since = sim_now();
        if (moved)
            continue;
        code = comm_wait(open->c, word, seen, since, single ? 0 : 0.001);
        if (wait_is_long(since, &said)) {
            bool missing[MAX_RANKS] = {false};
            missing[open->peer] = true;
            trace_wait(open->c, OP_NAMES[open->kind], missing);
        }
        if (code == ACL_ERROR_RT_FFTS_PLUS_TIMEOUT)
            code = batch_timeout(b, code);
    }
    for (size_t n = 0; n < b->number; n++) {
        if (!b->item[n].done)
            code = comm_fail(b->item[n].c, HCCL_E_INTERNAL, code, "HCCL communicator %s: %s of rank %u was given up",
                             b->item[n].c->name, OP_NAMES[b->item[n].kind], b->item[n].c->rank);
        comm_release(b->item[n].c);
    }
    free(b);
    return code;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static HcclResult check_type(const char *name, int type) {
    if (hccl_type_bytes(type))
        return HCCL_SUCCESS;
    return sim_fail(HCCL_E_NOT_SUPPORT, "%s: %d is no data type of the simulated HCCL", name, type);
}

/* A task for a call with sound arguments. */
static HcclResult begin(struct task **result, struct comm *c, hccl_op op, int type, int reduce, uint32_t root,
                        uint64_t count) {
    const char *name = OP_NAMES[op];
    *result = NULL;
    if (!c)
        return sim_fail(HCCL_E_PTR, "%s: comm is NULL", name);
    HcclResult status = check_type(name, type);
    if (status)
        return status;
    if (reduce != HCCL_REDUCE_NONE && !hccl_can_reduce(type, reduce))
        return sim_fail(HCCL_E_NOT_SUPPORT, "%s: no reduction %s of %s (reduction %d, data type %d)", name,
                        hccl_reduce_name(reduce), hccl_type_name(type), reduce, type);
    if (root != NO_ROOT && root >= c->ranks)
        return sim_fail(HCCL_E_PARA, "%s: root %u; communicator %s has %u ranks", name, root, c->name, c->ranks);
    if (count > UINT64_MAX / hccl_type_bytes(type) / c->ranks)
        return sim_fail(HCCL_E_PARA, "%s: count %llu is too large", name, (unsigned long long)count);
    struct task *t = calloc(1, sizeof *t);
    if (!t)
        return sim_fail(HCCL_E_MEMORY, "%s: out of host memory", name);
    t->c = c;
    t->d = (struct description){op, (uint32_t)type, (uint32_t)reduce, root, count, 0};
    *result = t;
    return HCCL_SUCCESS;
}

/* Trace and hand over to the stream. `bytes` in the trace is what this rank hands in (with equal counts: count
 * elements, times ranks for reduce-scatter, all-to-all and the root of a scatter); where it hands in nothing, what it
 * takes. */
static HcclResult enqueue(struct task *t, const void *from, void *to, bool reads, bool writes, uint64_t bytes,
                          aclrtStream stream) {
    struct comm *c = t->c;
    const char *name = OP_NAMES[t->d.op];
    t->from = from;
    t->to = to;
    t->bytes = bytes;
    if ((reads && !from) || (writes && !to)) {
        free(t);
        return sim_fail(HCCL_E_PTR, "%s: a buffer is NULL", name);
    }
    if (sim_tracing) {
        char more[96];
        int used = t->d.reduce == HCCL_REDUCE_NONE ? 0 : snprintf(more, sizeof more, ", \"op\": \"%s\"",
                                                                  hccl_reduce_name((int)t->d.reduce));
        more[used] = 0;
        if (t->d.root != NO_ROOT)
            snprintf(more + used, sizeof more - (size_t)used, ", \"root\": %u", t->d.root);
        sim_trace_line(name, "\"comm\": \"%s\", \"rank\": %u, \"ranks\": %u, \"count\": %llu, \"dtype\": \"%s\", "
                       "\"bytes\": %llu%s, \"stream\": \"%p\"", c->name, c->rank, c->ranks,
                       (unsigned long long)t->d.count, hccl_type_name((int)t->d.type), (unsigned long long)bytes, more,
                       stream);
    }
    comm_retain(c);
    pthread_mutex_lock(&submission);
    t->ticket = c->collective.submitted;
    int code = sim_stream_submit(stream, name, run_collective, t);
    c->collective.submitted += code == 0;
    pthread_mutex_unlock(&submission);
    if (!code)
        return HCCL_SUCCESS;
    comm_release(c);
    free(t);
    return HCCL_E_RUNTIME;
}

/* Extents of counts and displacements in elements; their sum. Without displacements the extents follow one another. */
static uint64_t set_extents(struct extent *extent, const uint64_t *counts, const uint64_t *displacements,
                            uint32_t ranks, size_t size) {
    uint64_t sum = 0;
    for (uint32_t rank = 0; rank < ranks; rank++) {
        extent[rank] = (struct extent){counts[rank] * size, displacements ? displacements[rank] * size : sum};
        sum += extent[rank].bytes;
    }
    return sum;
}

static uint64_t set_equal_extents(struct extent *extent, uint64_t bytes, uint32_t ranks) {
    for (uint32_t rank = 0; rank < ranks; rank++)
        extent[rank] = (struct extent){bytes, rank * bytes};
    return bytes * ranks;
}

static uint64_t largest_extent(const struct extent *extent, uint32_t ranks) {
    uint64_t largest = 0;
    for (uint32_t rank = 0; rank < ranks; rank++)
        largest = extent[rank].bytes > largest ? extent[rank].bytes : largest;
    return largest;
}

static uint64_t hash_counts(const uint64_t *counts, size_t number) {
    uint64_t hash = 1;
    for (size_t i = 0; i < number; i++)
        hash = (hash ^ counts[i]) * UINT64_C(0x9e3779b97f4a7c15), hash ^= hash >> 29;
    return hash | 1;
}

EXPORT HcclResult HcclAllReduce(void *send, void *recv, uint64_t count, HcclDataType type, HcclReduceOp op,
                                struct comm *c, aclrtStream stream) {
    struct task *t;
    HcclResult status = begin(&t, c, OP_ALL_REDUCE, (int)type, (int)op, NO_ROOT, count);
    return status ? status : enqueue(t, send, recv, count, count, count * hccl_type_bytes((int)type), stream);
}

EXPORT HcclResult HcclReduce(void *send, void *recv, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                             struct comm *c, aclrtStream stream) {
    struct task *t;
    HcclResult status = begin(&t, c, OP_REDUCE, (int)type, (int)op, root, count);
    return status ? status
                  : enqueue(t, send, recv, count, count && root == c->rank, count * hccl_type_bytes((int)type), stream);
}

EXPORT HcclResult HcclAllGather(void *send, void *recv, uint64_t count, HcclDataType type, struct comm *c,
                                aclrtStream stream) {
    struct task *t;
    HcclResult status = begin(&t, c, OP_ALL_GATHER, (int)type, HCCL_REDUCE_NONE, NO_ROOT, count);
    if (status)
        return status;
    t->largest = count * hccl_type_bytes((int)type);
    t->send[c->rank].bytes = t->largest;
    set_equal_extents(t->recv, t->largest, c->ranks);
    return enqueue(t, send, recv, count, count, t->largest, stream);
}

EXPORT HcclResult HcclAllGatherV(void *send, uint64_t send_count, void *recv, const void *recv_counts,
                                 const void *recv_displacements, HcclDataType type, struct comm *c,
                                 aclrtStream stream) {
    struct task *t;
    if (!recv_counts || !recv_displacements)
        return sim_fail(HCCL_E_PTR, "HcclAllGatherV: recvCounts or recvDispls is NULL");
    HcclResult status = begin(&t, c, OP_ALL_GATHER_V, (int)type, HCCL_REDUCE_NONE, NO_ROOT, 0);
    if (status)
        return status;
    const uint64_t *counts = recv_counts;
    if (counts[c->rank] != send_count) {
        free(t);
        return sim_fail(HCCL_E_PARA, "HcclAllGatherV: rank %u sends %llu elements; recvCounts says %llu", c->rank,
                        (unsigned long long)send_count, (unsigned long long)counts[c->rank]);
    }
    uint64_t sum = set_extents(t->recv, counts, recv_displacements, c->ranks, hccl_type_bytes((int)type));
    for (uint32_t rank = 0; rank < c->ranks; rank++)
        t->d.count += counts[rank];
    t->d.counts_hash = hash_counts(counts, c->ranks);
    t->largest = largest_extent(t->recv, c->ranks);
    t->send[c->rank].bytes = t->recv[c->rank].bytes;
    return enqueue(t, send, recv, send_count, sum, t->recv[c->rank].bytes, stream);
}

EXPORT HcclResult HcclReduceScatter(void *send, void *recv, uint64_t count, HcclDataType type, HcclReduceOp op,
                                    struct comm *c, aclrtStream stream) {
    struct task *t;
    HcclResult status = begin(&t, c, OP_REDUCE_SCATTER, (int)type, (int)op, NO_ROOT, count);
    if (status)
        return status;
    t->largest = count * hccl_type_bytes((int)type);
    t->recv[c->rank].bytes = t->largest;
    uint64_t sum = set_equal_extents(t->send, t->largest, c->ranks);
    return enqueue(t, send, recv, count, count, sum, stream);
}

EXPORT HcclResult HcclReduceScatterV(void *send, const void *send_counts, const void *send_displacements, void *recv,
                                     uint64_t recv_count, HcclDataType type, HcclReduceOp op, struct comm *c,
                                     aclrtStream stream) {
    struct task *t;
    if (!send_counts || !send_displacements)
        return sim_fail(HCCL_E_PTR, "HcclReduceScatterV: sendCounts or sendDispls is NULL");
    HcclResult status = begin(&t, c, OP_REDUCE_SCATTER_V, (int)type, (int)op, NO_ROOT, 0);
    if (status)
        return status;
    const uint64_t *counts = send_counts;
    if (counts[c->rank] != recv_count) {
        free(t);
        return sim_fail(HCCL_E_PARA, "HcclReduceScatterV: rank %u takes %llu elements; sendCounts says %llu", c->rank,
                        (unsigned long long)recv_count, (unsigned long long)counts[c->rank]);
    }
    uint64_t sum = set_extents(t->send, counts, send_displacements, c->ranks, hccl_type_bytes((int)type));
    for (uint32_t rank = 0; rank < c->ranks; rank++)
        t->d.count += counts[rank];
    t->d.counts_hash = hash_counts(counts, c->ranks);
    t->largest = largest_extent(t->send, c->ranks);
    t->recv[c->rank].bytes = t->send[c->rank].bytes;
    return enqueue(t, send, recv, sum, recv_count, sum, stream);
}

EXPORT HcclResult HcclBroadcast(void *buffer, uint64_t count, HcclDataType type, uint32_t root, struct comm *c,
                                aclrtStream stream) {
    struct task *t;
    HcclResult status = begin(&t, c, OP_BROADCAST, (int)type, HCCL_REDUCE_NONE, root, count);
    if (status)
        return status;
    t->largest = count * hccl_type_bytes((int)type);
    if (c->rank == root)
        t->send[root].bytes = t->largest;
    else
        t->recv[root].bytes = t->largest;
    return enqueue(t, buffer, buffer, count, count, t->largest, stream);
}

EXPORT HcclResult HcclScatter(void *send, void *recv, uint64_t count, HcclDataType type, uint32_t root, struct comm *c,
                              aclrtStream stream) {
    struct task *t;
    HcclResult status = begin(&t, c, OP_SCATTER, (int)type, HCCL_REDUCE_NONE, root, count);
    if (status)
        return status;
    t->largest = count * hccl_type_bytes((int)type);
    uint64_t bytes = c->rank == root ? set_equal_extents(t->send, t->largest, c->ranks) : t->largest;
    t->recv[root].bytes = t->largest;
    return enqueue(t, send, recv, count && c->rank == root, count, bytes, stream);
}

EXPORT HcclResult HcclAlltoAll(const void *send, uint64_t send_count, HcclDataType send_type, const void *recv,
                               uint64_t recv_count, HcclDataType recv_type, struct comm *c, aclrtStream stream) {
    struct task *t;
    HcclResult status = check_type("HcclAlltoAll", (int)recv_type);
    status = status ? status : begin(&t, c, OP_ALL_TO_ALL, (int)send_type, HCCL_REDUCE_NONE, NO_ROOT, send_count);
    if (status)
        return status;
    t->largest = send_count * hccl_type_bytes((int)send_type);
    if (t->largest != recv_count * hccl_type_bytes((int)recv_type)) {
        free(t);
        return sim_fail(HCCL_E_PARA, "HcclAlltoAll: %llu elements of %s are not %llu of %s",
                        (unsigned long long)send_count, hccl_type_name((int)send_type), (unsigned long long)recv_count,
                        hccl_type_name((int)recv_type));
    }
    uint64_t sum = set_equal_extents(t->send, t->largest, c->ranks);
    set_equal_extents(t->recv, t->largest, c->ranks);
    return enqueue(t, send, (void *)recv, sum, sum, sum, stream);
}

EXPORT HcclResult HcclAlltoAllV(const void *send, const void *send_counts, const void *send_displacements,
                                HcclDataType send_type, const void *recv, const void *recv_counts,
                                const void *recv_displacements, HcclDataType recv_type, struct comm *c,
                                aclrtStream stream) {
    struct task *t;
    if (!send_counts || !send_displacements || !recv_counts || !recv_displacements)
        return sim_fail(HCCL_E_PTR, "HcclAlltoAllV: counts or displacements are NULL");
    HcclResult status = check_type("HcclAlltoAllV", (int)recv_type);
    status = status ? status : begin(&t, c, OP_ALL_TO_ALL_V, (int)send_type, HCCL_REDUCE_NONE, NO_ROOT, 0);
    if (status)
        return status;
    uint64_t sent = set_extents(t->send, send_counts, send_displacements, c->ranks, hccl_type_bytes((int)send_type));
    uint64_t taken = set_extents(t->recv, recv_counts, recv_displacements, c->ranks, hccl_type_bytes((int)recv_type));
    return enqueue(t, send, (void *)recv, sent, taken, sent, stream);
}

EXPORT HcclResult HcclAlltoAllVC(const void *send, const void *count_matrix, HcclDataType send_type, const void *recv,
                                 HcclDataType recv_type, struct comm *c, aclrtStream stream) {
    struct task *t;
    if (!count_matrix)
        return sim_fail(HCCL_E_PTR, "HcclAlltoAllVC: sendCountMatrix is NULL");
    if (send_type != recv_type)
        return sim_fail(HCCL_E_NOT_SUPPORT, "HcclAlltoAllVC: sendType %s, recvType %s: they must be the same",
                        hccl_type_name((int)send_type), hccl_type_name((int)recv_type));
    HcclResult status = begin(&t, c, OP_ALL_TO_ALL_VC, (int)send_type, HCCL_REDUCE_NONE, NO_ROOT, 0);
    if (status)
        return status;
    const uint64_t *matrix = count_matrix;
    const size_t size = hccl_type_bytes((int)send_type);
    uint64_t column[MAX_RANKS];
    for (uint32_t from = 0; from < c->ranks; from++) {
        column[from] = matrix[from * c->ranks + c->rank];
        for (uint32_t to = 0; to < c->ranks; to++) {
            uint64_t bytes = matrix[from * c->ranks + to] * size;
            t->largest = bytes > t->largest ? bytes : t->largest;
            t->d.count += matrix[from * c->ranks + to];
        }
    }
    t->d.counts_hash = hash_counts(matrix, (size_t)c->ranks * c->ranks);
    uint64_t sent = set_extents(t->send, matrix + (size_t)c->rank * c->ranks, NULL, c->ranks, size);
    uint64_t taken = set_extents(t->recv, column, NULL, c->ranks, size);
    return enqueue(t, send, (void *)recv, sent, taken, sent, stream);
}

EXPORT HcclResult HcclBarrier(struct comm *c, aclrtStream stream) {
    struct task *t;
    HcclResult status = begin(&t, c, OP_BARRIER, HCCL_INT8, HCCL_REDUCE_NONE, NO_ROOT, 0);
    return status ? status : enqueue(t, NULL, NULL, false, false, 0, stream);
}

/* Make a message of a call's arguments. */
static HcclResult message(struct item *i, const char *name, hccl_op kind, void *buffer, uint64_t count, int type,
                          uint32_t peer, struct comm *c, aclrtStream stream) {
    HcclResult status = check_type(name, type);
    if (status)
        return status;
    if (peer >= c->ranks)
        return sim_fail(HCCL_E_PARA, "%s: peer %u; communicator %s has %u ranks", name, peer, c->name, c->ranks);
    if (count > UINT64_MAX / hccl_type_bytes(type))
        return sim_fail(HCCL_E_PARA, "%s: count %llu is too large", name, (unsigned long long)count);
    if (count && !buffer)
        return sim_fail(HCCL_E_PTR, "%s: the buffer is NULL", name);
    *i = (struct item){.c = c, .stream = stream, .kind = kind, .peer = peer, .buffer = buffer,
                       .bytes = count * hccl_type_bytes(type)};
    SIM_TRACE(name, "\"comm\": \"%s\", \"rank\": %u, \"ranks\": %u, \"count\": %llu, \"dtype\": \"%s\", "
              "\"bytes\": %llu, \"direction\": \"%s\", \"peer\": %u, \"stream\": \"%p\"", c->name, c->rank, c->ranks,
              (unsigned long long)count, hccl_type_name(type), (unsigned long long)i->bytes,
              kind == OP_SEND ? "send" : "recv", peer, stream);
    return HCCL_SUCCESS;
}

/* Hand messages of one stream over to it; they progress together. */
static HcclResult enqueue_items(const struct item *items, size_t number, const char *name, aclrtStream stream) {
    struct batch *b = malloc(sizeof *b + number * sizeof *items);
    if (!b)
        return sim_fail(HCCL_E_MEMORY, "%s: out of host memory", name);
    b->number = number;
    memcpy(b->item, items, number * sizeof *items);
    pthread_mutex_lock(&submission);
    for (size_t n = 0; n < number; n++) {
        comm_retain(b->item[n].c);
        b->item[n].ticket = item_lane(&b->item[n])->submitted++;
    }
    int code = sim_stream_submit(stream, name, run_batch, b);
    for (size_t n = 0; code && n < number; n++) {
        item_lane(&b->item[n])->submitted--;
        comm_release(b->item[n].c);
    }
    pthread_mutex_unlock(&submission);
    if (!code)
        return HCCL_SUCCESS;
    free(b);
    return HCCL_E_RUNTIME;
}

static HcclResult group_add(const struct item *i) {
    if (group.number == group.room) {
        size_t room = group.room ? group.room * 2 : 16;
        struct item *larger = realloc(group.item, room * sizeof *larger);
        if (!larger)
            return sim_fail(HCCL_E_MEMORY, "HCCL: out of host memory");
        group.item = larger;
        group.room = room;
    }
    comm_retain(i->c);
    group.item[group.number++] = *i;
    return HCCL_SUCCESS;
}

static HcclResult send_or_recv(hccl_op kind, void *buffer, uint64_t count, int type, uint32_t peer, struct comm *c,
                               aclrtStream stream) {
    struct item i;
    if (!c)
        return sim_fail(HCCL_E_PTR, "%s: comm is NULL", OP_NAMES[kind]);
    if (peer == c->rank && !group.depth)
        return sim_fail(HCCL_E_PARA, "%s: rank %u is this rank itself, which only a batch or group can serve",
                        OP_NAMES[kind], peer);
    HcclResult status = message(&i, OP_NAMES[kind], kind, buffer, count, type, peer, c, stream);
    if (status)
        return status;
    return group.depth ? group_add(&i) : enqueue_items(&i, 1, OP_NAMES[kind], stream);
}

EXPORT HcclResult HcclSend(void *buffer, uint64_t count, HcclDataType type, uint32_t peer, struct comm *c,
                           aclrtStream stream) {
    return send_or_recv(OP_SEND, buffer, count, (int)type, peer, c, stream);
}

EXPORT HcclResult HcclRecv(void *buffer, uint64_t count, HcclDataType type, uint32_t peer, struct comm *c,
                           aclrtStream stream) {
    return send_or_recv(OP_RECV, buffer, count, (int)type, peer, c, stream);
}

typedef struct { int kind; void *buffer; uint64_t count; int type; uint32_t peer; } HcclSendRecvItem;

EXPORT HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t number, struct comm *c, aclrtStream stream) {
    const char *name = OP_NAMES[OP_BATCH];
    if (!c || !items)
        return sim_fail(HCCL_E_PTR, "%s: comm or sendRecvInfo is NULL", name);
    if (!number)
        return sim_fail(HCCL_E_PARA, "%s: no items", name);
    struct item *list = malloc(number * sizeof *list);
    if (!list)
        return sim_fail(HCCL_E_MEMORY, "%s: out of host memory", name);
    HcclResult status = HCCL_SUCCESS;
    for (uint32_t n = 0; n < number && !status; n++) {
        if (items[n].kind != 0 && items[n].kind != 1)
            status = sim_fail(HCCL_E_PARA, "%s: sendRecvType %d of item %u", name, items[n].kind, n);
        else
            status = message(&list[n], name, items[n].kind ? OP_RECV : OP_SEND, items[n].buffer, items[n].count,
                             items[n].type, items[n].peer, c, stream);
    }
    for (uint32_t n = 0; n < number && !status && group.depth; n++)
        status = group_add(&list[n]);
    if (!status && !group.depth)
        status = enqueue_items(list, number, name, stream);
    free(list);
    return status;
}

EXPORT HcclResult HcclGroupStart(void) {
    group.depth++;
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGroupEnd(void) {
    if (!group.depth)
        return sim_fail(HCCL_E_PARA, "HcclGroupEnd without HcclGroupStart");
    if (--group.depth)
        return HCCL_SUCCESS;
    HcclResult status = HCCL_SUCCESS;
    struct item *items = group.item;
    size_t left = group.number;
    memset(&group, 0, sizeof group);
    struct item *same = malloc((left + !left) * sizeof *same);
    if (!same)
        status = sim_fail(HCCL_E_MEMORY, "HcclGroupEnd: out of host memory");
    while (left && !status) {
        aclrtStream stream = items[0].stream;
        size_t number = 0, others = 0;
        for (size_t n = 0; n < left; n++) {
            if (items[n].stream == stream)
                same[number++] = items[n];
            else
                items[others++] = items[n];
        }
        left = others;
        status = enqueue_items(same, number, "HcclGroupEnd", stream);
        for (size_t n = 0; n < number; n++)
            comm_release(same[n].c);
    }
    for (size_t n = 0; n < left; n++)
        comm_release(items[n].c);
    free(items);
    free(same);
    return status;
}

/* ---- questions --------------------------------------------------------------------------------------------------- */

EXPORT HcclResult HcclGetCommName(struct comm *c, char *name) {
    if (!c || !name)
        return sim_fail(HCCL_E_PTR, "HcclGetCommName: a pointer is NULL");
    memcpy(name, c->name, sizeof c->name);
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetRankSize(struct comm *c, uint32_t *ranks) {
    if (!c || !ranks)
        return sim_fail(HCCL_E_PTR, "HcclGetRankSize: a pointer is NULL");
    *ranks = c->ranks;
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetRankId(struct comm *c, uint32_t *rank) {
    if (!c || !rank)
        return sim_fail(HCCL_E_PTR, "HcclGetRankId: a pointer is NULL");
    *rank = c->rank;
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetCommAsyncError(struct comm *c, HcclResult *error) {
    if (!c || !error)
        return sim_fail(HCCL_E_PTR, "HcclGetCommAsyncError: a pointer is NULL");
    *error = (HcclResult)atomic_load(&c->async_error);
    if (*error) {
        /* So that whoever reports the error finds its reason in aclGetRecentErrMsg. */
        pthread_mutex_lock(&c->lock);
        sim_fail(*error, "%s", c->message);
        pthread_mutex_unlock(&c->lock);
    }
    return HCCL_SUCCESS;
}

EXPORT const char *HcclGetErrorString(HcclResult code) {
    static const char *const texts[] = {
        "no error", "parameter error", "empty pointer", "memory error", "internal error", "feature not supported",
        "resource not found", "resource unavailable", "system call failed", "timeout", "cannot open file",
        "TCP connection failed", "RoCE connection failed", "TCP transfer failed", "RoCE transfer failed",
        "runtime call failed", "driver call failed", "profiling call failed", "CCE call failed", "network call failed",
        "try again", "error of a remote rank", "communicator is suspending", "operation retry failed", "out of memory",
    };
    return (unsigned)code < sizeof texts / sizeof texts[0] ? texts[code] : "unknown error";
}

EXPORT uint32_t HcclGetCommConfigCapability(void) {
    return HCCL_CONFIG_CAPABILITY;
}

enum { CONFIG_DETERMINISTIC, CONFIG_ACCELERATOR, CONFIG_NUMBER };

union config_value { int32_t value; };

static _Atomic int32_t config_values[CONFIG_NUMBER];

/* The simulated reductions are always deterministic; the setting is only kept. */
EXPORT HcclResult HcclSetConfig(int config, union config_value value) {
    if (config < 0 || config >= CONFIG_NUMBER || value.value < 0)
        return sim_fail(HCCL_E_PARA, "HcclSetConfig: configuration %d, value %d", config, value.value);
    atomic_store(&config_values[config], value.value);
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclGetConfig(int config, union config_value *value) {
    if (!value)
        return sim_fail(HCCL_E_PTR, "HcclGetConfig: configValue is NULL");
    if (config < 0 || config >= CONFIG_NUMBER)
        return sim_fail(HCCL_E_PARA, "HcclGetConfig: configuration %d", config);
    value->value = atomic_load(&config_values[config]);
    return HCCL_SUCCESS;
}

EXPORT HcclResult HcclCommSuspend(struct comm *c) {
    return sim_fail(HCCL_E_NOT_SUPPORT, "simulated device: HcclCommSuspend of communicator %s is not implemented",
                    c ? c->name : "NULL");
}

EXPORT HcclResult HcclCommResume(struct comm *c) {
    return sim_fail(HCCL_E_NOT_SUPPORT, "simulated device: HcclCommResume of communicator %s is not implemented",
                    c ? c->name : "NULL");
}
