/* Device memory, pinned host memory and copies. Every allocation is a mapping of its own: untouched pages cost nothing,
 * freed ones go back to the system, and a use after free is a fault instead of a wrong number. What a device holds is
 * counted per process. */
#define _GNU_SOURCE
#include "sim.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "state.h"

#define PAGE 4096u
#define HUGE_PAGE (2u << 20) /* the granularity of the device's virtual memory */

enum kind { DEVICE, PINNED, REGISTERED, RESERVED };

struct physical {
    void *home;    /* the pages' own mapping; a mapping by the user is a second view of them */
    size_t size;
    int device;
    int maps;
    bool freed;
};

struct region {
    uintptr_t start, end;
    enum kind kind;
    int device;
    struct physical *physical; /* of a mapping made by aclrtMapMem */
};

/* Sorted by address; no two regions of a table overlap. Reserved addresses are apart: mappings lie inside them. */
struct table {
    struct region *regions;
    size_t count, room;
};

static struct table memory, reserved;
static uint64_t used[SIM_MAX_DEVICES], peak[SIM_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void sim_memory_before_fork(void) { pthread_mutex_lock(&lock); }
void sim_memory_after_fork(void) { pthread_mutex_unlock(&lock); }

/* The number of regions that start at or below the address. */
static size_t position(const struct table *table, uintptr_t address) {
    size_t low = 0, high = table->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table->regions[middle].start <= address) low = middle + 1;
        else high = middle;
    }
    return low;
}

static struct region *find(const struct table *table, const void *pointer) {
    size_t after = position(table, (uintptr_t)pointer);
    if (!after) return NULL;
    struct region *region = &table->regions[after - 1];
    return (uintptr_t)pointer < region->end ? region : NULL;
}

static struct region *find_start(const struct table *table, const void *pointer, enum kind kind) {
    struct region *region = find(table, pointer);
    return region && region->start == (uintptr_t)pointer && region->kind == kind ? region : NULL;
}

/* 0, or ENOMEM, or EEXIST where the region would overlap another. */
static int insert(struct table *table, struct region region) {
    size_t at = position(table, region.start);
    if (at && table->regions[at - 1].end > region.start) return EEXIST;
    if (at < table->count && table->regions[at].start < region.end) return EEXIST;
    if (table->count == table->room) {
        size_t room = table->room ? 2 * table->room : 256;
        struct region *grown = realloc(table->regions, room * sizeof *grown);
        if (!grown) return ENOMEM;
        table->regions = grown;
        table->room = room;
    }
    memmove(&table->regions[at + 1], &table->regions[at], (table->count - at) * sizeof region);
    table->regions[at] = region;
    table->count++;
    return 0;
}

static void erase(struct table *table, struct region *region) {
    size_t at = (size_t)(region - table->regions);
    memmove(region, region + 1, (--table->count - at) * sizeof *region);
}

static size_t round_up(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

/* Count the bytes against the device's limit; called under the lock. */
static bool charge(int device, size_t size) {
    if (size > sim_device_memory() - used[device]) return false;
    used[device] += size;
    if (used[device] > peak[device]) peak[device] = used[device];
    return true;
}

static int out_of_memory(int device, size_t size, uint64_t taken) {
    return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION,
                    "device %d: %zu bytes do not fit, %llu of %llu are in use (NPU_SIM_MEMORY)", device, size,
                    (unsigned long long)taken, (unsigned long long)sim_device_memory());
}

uint64_t sim_memory_used(int device) {
    pthread_mutex_lock(&lock);
    uint64_t bytes = used[device];
    pthread_mutex_unlock(&lock);
    return bytes;
}

/* ---- device memory ---- */

static int allocate(const char *call, void **pointer, size_t size) {
    SIM_TRACE(call, "\"device\": %d, \"size\": %zu", sim_current_device(), size);
    int device = sim_current_device();
    if (device < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "%s: this thread has not chosen a device", call);
    if (!pointer || !size) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: a null pointer or no bytes", call);
    if (size > sim_device_memory()) return out_of_memory(device, size, sim_memory_used(device));
    size = round_up(size, PAGE);
    pthread_mutex_lock(&lock);
    if (!charge(device, size)) {
        uint64_t taken = used[device];
        pthread_mutex_unlock(&lock);
        return out_of_memory(device, size, taken);
    }
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int error = start == MAP_FAILED ? errno : 0;
    if (!error) {
        error = insert(&memory, (struct region){(uintptr_t)start, (uintptr_t)start + size, DEVICE, device, NULL});
        if (error) munmap(start, size);
    }
    if (error) used[device] -= size;
    pthread_mutex_unlock(&lock);
    if (error)
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: the host has no room for %zu bytes: %s", call, size,
                        strerror(error));
    *pointer = start;
    return 0;
}

EXPORT aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    (void)policy; /* pages of every size are the host's */
    return allocate("aclrtMalloc", pointer, size);
}

EXPORT aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
    (void)policy;
    return allocate("aclrtMallocAlign32", pointer, size);
}

EXPORT aclError aclrtFree(void *pointer) {
    SIM_TRACE("aclrtFree", "\"pointer\": \"%p\"", pointer);
    pthread_mutex_lock(&lock);
    struct region *region = find_start(&memory, pointer, DEVICE);
    if (!region || region->physical) {
        pthread_mutex_unlock(&lock);
        return sim_fail(ACL_ERROR_RT_MEMORY_FREE, "aclrtFree: %p is not the start of an allocation", pointer);
    }
    size_t size = region->end - region->start;
    used[region->device] -= size;
    munmap(pointer, size);
    erase(&memory, region);
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT aclError aclrtGetMemInfo(aclrtMemAttr attribute, size_t *free_bytes, size_t *total) {
    SIM_TRACE(__func__, "");
    (void)attribute; /* there is one kind of memory */
    int device = sim_current_device();
    if (device < 0) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "aclrtGetMemInfo: this thread has not chosen a device");
    if (free_bytes) *free_bytes = sim_device_memory() - sim_memory_used(device);
    if (total) *total = sim_device_memory();
    return 0;
}

EXPORT aclError aclrtGetMemUsageInfo(int32_t device, aclrtMemUsageInfo *infos, size_t count, size_t *written) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device(device);
    if (error) return error;
    *written = 0;
    if (!count) return 0;
    memset(infos, 0, sizeof *infos);
    snprintf(infos->name, sizeof infos->name, "APP");
    pthread_mutex_lock(&lock);
    infos->curMemSize = used[device];
    infos->memPeakSize = peak[device];
    pthread_mutex_unlock(&lock);
    *written = 1;
    return 0;
}

/* ---- virtual memory (expandable segments) ---- */

EXPORT aclError aclrtReserveMemAddress(void **pointer, size_t size, size_t alignment, void *expected, uint64_t flags) {
    (void)alignment, (void)expected, (void)flags; /* a hint of the address need not be followed */
    SIM_TRACE("aclrtReserveMemAddress", "\"size\": %zu", size);
    if (!pointer || !size) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtReserveMemAddress: no bytes");
    size = round_up(size, HUGE_PAGE);
    /* Room for one granule more, so that the start can lie on a granule; what is over is given back. */
    char *start = mmap(NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%zu bytes of addresses: %s", size, strerror(errno));
    char *aligned = (char *)round_up((uintptr_t)start, HUGE_PAGE);
    if (aligned > start) munmap(start, (size_t)(aligned - start));
    munmap(aligned + size, (size_t)(start + HUGE_PAGE - aligned));
    pthread_mutex_lock(&lock);
    int error = insert(&reserved, (struct region){(uintptr_t)aligned, (uintptr_t)aligned + size, RESERVED, -1, NULL});
    pthread_mutex_unlock(&lock);
    if (error) {
        munmap(aligned, size);
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%zu bytes of addresses: %s", size, strerror(error));
    }
    *pointer = aligned;
    return 0;
}

EXPORT aclError aclrtReleaseMemAddress(void *pointer) {
    SIM_TRACE("aclrtReleaseMemAddress", "\"pointer\": \"%p\"", pointer);
    pthread_mutex_lock(&lock);
    struct region *region = find_start(&reserved, pointer, RESERVED);
    size_t first = region ? position(&memory, region->start - 1) : 0;
    bool mapped = region && first < memory.count && memory.regions[first].start < region->end;
    if (region && !mapped) {
        munmap(pointer, region->end - region->start);
        erase(&reserved, region);
    }
    pthread_mutex_unlock(&lock);
    if (!region) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%p is not the start of reserved addresses", pointer);
    if (mapped) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "the addresses at %p still have memory mapped", pointer);
    return 0;
}

EXPORT aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *property,
                                    uint64_t flags) {
    (void)flags;
    int device = property && property->location.type == ACL_MEM_LOCATION_TYPE_DEVICE ? (int)property->location.id : -1;
    SIM_TRACE("aclrtMallocPhysical", "\"device\": %d, \"size\": %zu", device, size);
    if (!handle || !size || device < 0)
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMallocPhysical: no bytes or no device");
    int error = sim_check_device(device);
    if (error) return error;
    if (size > sim_device_memory()) return out_of_memory(device, size, sim_memory_used(device));
    size = round_up(size, PAGE);
    struct physical *physical = malloc(sizeof *physical);
    if (!physical) return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "aclrtMallocPhysical: the host has no memory");
    pthread_mutex_lock(&lock);
    bool fits = charge(device, size);
    uint64_t taken = used[device];
    pthread_mutex_unlock(&lock);
    if (!fits) {
        free(physical);
        return out_of_memory(device, size, taken);
    }
    /* Shared, because only shared pages can be seen at a second address; anonymous, so that no file exists. */
    void *home = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (home == MAP_FAILED) {
        error = errno;
        pthread_mutex_lock(&lock);
        used[device] -= size;
        pthread_mutex_unlock(&lock);
        free(physical);
        return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "no room on the host for %zu bytes: %s", size, strerror(error));
    }
    *physical = (struct physical){home, size, device, 0, false};
    *handle = physical;
    return 0;
}

/* Called under the lock once neither the handle nor a mapping of it is left. */
static void release(struct physical *physical) {
    munmap(physical->home, physical->size);
    used[physical->device] -= physical->size;
    free(physical);
}

EXPORT aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
    SIM_TRACE("aclrtFreePhysical", "\"handle\": \"%p\"", handle);
    struct physical *physical = handle;
    if (!physical) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtFreePhysical: a null handle");
    pthread_mutex_lock(&lock);
    physical->freed = true;
    if (!physical->maps) release(physical);
    pthread_mutex_unlock(&lock);
    return 0;
}

EXPORT aclError aclrtMapMem(void *pointer, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags) {
    (void)flags;
    SIM_TRACE("aclrtMapMem", "\"pointer\": \"%p\", \"size\": %zu", pointer, size);
    struct physical *physical = handle;
    if (!physical || !size || size % PAGE || offset % PAGE || (uintptr_t)pointer % PAGE || offset > physical->size ||
        size > physical->size - offset)
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem: %zu bytes at offset %zu of a handle", size, offset);
    pthread_mutex_lock(&lock);
    struct region *room = find(&reserved, pointer);
    uintptr_t start = (uintptr_t)pointer;
    const char *problem = NULL;
    if (!room || size > room->end - start) problem = "the addresses are not reserved";
    else if (insert(&memory, (struct region){start, start + size, DEVICE, physical->device, physical}))
        problem = "the addresses have memory already";
    else if (mremap((char *)physical->home + offset, 0, size, MREMAP_MAYMOVE | MREMAP_FIXED, pointer) == MAP_FAILED) {
        problem = strerror(errno); /* (an old size of 0 makes a second view of shared pages) */
        erase(&memory, find(&memory, pointer));
    } else
        physical->maps++;
    pthread_mutex_unlock(&lock);
    return problem ? sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtMapMem at %p: %s", pointer, problem) : 0;
}

EXPORT aclError aclrtUnmapMem(void *pointer) {
    SIM_TRACE("aclrtUnmapMem", "\"pointer\": \"%p\"", pointer);
    pthread_mutex_lock(&lock);
    struct region *region = find_start(&memory, pointer, DEVICE);
    struct physical *physical = region ? region->physical : NULL;
    if (physical) {
        mmap(pointer, region->end - region->start, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
             -1, 0);
        erase(&memory, region);
        if (!--physical->maps && physical->freed) release(physical);
    }
    pthread_mutex_unlock(&lock);
    return physical ? 0 : sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtUnmapMem: nothing is mapped at %p", pointer);
}

/* ---- host memory ---- */

static int allocate_host(const char *call, void **pointer, size_t size) {
    SIM_TRACE(call, "\"size\": %zu", size);
    if (!pointer || !size) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: a null pointer or no bytes", call);
    size_t mapped = round_up(size, PAGE);
    void *start = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int error = start == MAP_FAILED ? errno : 0;
    if (!error) {
        pthread_mutex_lock(&lock);
        error = insert(&memory, (struct region){(uintptr_t)start, (uintptr_t)start + mapped, PINNED, -1, NULL});
        pthread_mutex_unlock(&lock);
        if (error) munmap(start, mapped);
    }
    if (error) return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: %zu bytes: %s", call, size, strerror(error));
    *pointer = start;
    return 0;
}

EXPORT aclError aclrtMallocHost(void **pointer, size_t size) { return allocate_host("aclrtMallocHost", pointer, size); }

EXPORT aclError aclrtMallocHostWithCfg(void **pointer, uint64_t size, aclrtMallocConfig *config) {
    (void)config;
    return allocate_host("aclrtMallocHostWithCfg", pointer, size);
}

EXPORT aclError aclrtFreeHost(void *pointer) {
    SIM_TRACE("aclrtFreeHost", "\"pointer\": \"%p\"", pointer);
    pthread_mutex_lock(&lock);
    struct region *region = find_start(&memory, pointer, PINNED);
    if (region) {
        munmap(pointer, region->end - region->start);
        erase(&memory, region);
    }
    pthread_mutex_unlock(&lock);
    if (region) return 0;
    return sim_fail(ACL_ERROR_RT_MEMORY_FREE, "aclrtFreeHost: %p is not the start of an allocation", pointer);
}

static int register_host(const char *call, void *pointer, uint64_t size) {
    SIM_TRACE(call, "\"pointer\": \"%p\", \"size\": %llu", pointer, (unsigned long long)size);
    if (!pointer || !size) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: a null pointer or no bytes", call);
    pthread_mutex_lock(&lock);
    int error = insert(&memory, (struct region){(uintptr_t)pointer, (uintptr_t)pointer + size, REGISTERED, -1, NULL});
    pthread_mutex_unlock(&lock);
    if (error == EEXIST)
        return sim_fail(ACL_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "%s: memory at %p is known already", call, pointer);
    return error ? sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: %s", call, strerror(error)) : 0;
}

EXPORT aclError aclrtHostRegister(void *pointer, uint64_t size, aclrtHostRegisterType type, void **device_pointer) {
    (void)type;
    int error = register_host("aclrtHostRegister", pointer, size);
    if (!error && device_pointer) *device_pointer = pointer;
    return error;
}

EXPORT aclError aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t flag) {
    (void)flag;
    return register_host("aclrtHostRegisterV2", pointer, size);
}

EXPORT aclError aclrtHostUnregister(void *pointer) {
    SIM_TRACE("aclrtHostUnregister", "\"pointer\": \"%p\"", pointer);
    pthread_mutex_lock(&lock);
    struct region *region = find_start(&memory, pointer, REGISTERED);
    if (region) erase(&memory, region);
    pthread_mutex_unlock(&lock);
    return region ? 0 : sim_fail(ACL_ERROR_HOST_MEMORY_NOT_REGISTERED, "memory at %p is not registered", pointer);
}

EXPORT aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
    SIM_TRACE(__func__, "");
    if (!pointer || !attributes)
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtPointerGetAttributes: a null pointer");
    memset(attributes, 0, sizeof *attributes);
    attributes->location.type = ACL_MEM_LOCATION_TYPE_UNREGISTERED;
    pthread_mutex_lock(&lock);
    const struct region *region = find(&memory, pointer);
    if (region && region->kind == DEVICE) {
        attributes->location = (aclrtMemLocation){(uint32_t)region->device, ACL_MEM_LOCATION_TYPE_DEVICE};
        attributes->pageSize = region->physical ? HUGE_PAGE : PAGE;
    } else if (region) {
        attributes->location = (aclrtMemLocation){0, ACL_MEM_LOCATION_TYPE_HOST};
        attributes->pageSize = PAGE;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

/* ---- copies ---- */

enum place { ON_DEVICE, ON_HOST, PAGEABLE, ACROSS };

/* Where the bytes lie; ACROSS where they begin in known memory and leave it (neighbouring mappings count as one). */
static enum place place_of(const void *pointer, size_t size) {
    uintptr_t at = (uintptr_t)pointer, end = at + size;
    enum place place = PAGEABLE;
    pthread_mutex_lock(&lock);
    for (const struct region *region = find(&memory, pointer); region; region = find(&memory, (void *)at)) {
        enum place here = region->kind == DEVICE ? ON_DEVICE : ON_HOST;
        if (place != PAGEABLE && here != place) break;
        place = here;
        at = region->end;
        if (at >= end) break;
    }
    pthread_mutex_unlock(&lock);
    return place == ON_DEVICE && at < end ? ACROSS : place;
}

static int check_device_end(const char *call, const char *side, enum place place, bool wants_device,
                            const void *pointer, size_t size) {
    if (place == ACROSS)
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes at %s %p run past the end of device memory", call,
                        size, side, pointer);
    if (wants_device && place != ON_DEVICE)
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %s %p is not device memory", call, side, pointer);
    return 0;
}

struct copy {
    void *to;
    const void *from;
    size_t size;
    void *staged; /* freed after the copy */
};

static int run_copy(void *argument) {
    struct copy *copy = argument;
    if (!sim_task_cancelled()) memcpy(copy->to, copy->from, copy->size);
    free(copy->staged);
    free(copy);
    return 0;
}

/* With `wait` the call is synchronous and belongs to no stream. */
static int do_copy(const char *call, void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind,
                   bool wait, aclrtStream stream) {
    SIM_TRACE(call, "\"kind\": %d, \"size\": %zu, \"stream\": \"%p\"", (int)kind, size, stream);
    if (!size) return 0;
    if (!to || !from) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: a null pointer", call);
    if (size > room) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes into room for %zu", call, size, room);
    bool to_device = kind == ACL_MEMCPY_HOST_TO_DEVICE || kind == ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE;
    bool from_device = kind == ACL_MEMCPY_DEVICE_TO_HOST;
    if (kind == ACL_MEMCPY_DEVICE_TO_DEVICE || kind >= ACL_MEMCPY_INNER_DEVICE_TO_DEVICE)
        to_device = from_device = true;
    enum place target = place_of(to, size), source = place_of(from, size);
    int error = check_device_end(call, "target", target, to_device, to, size);
    if (!error) error = check_device_end(call, "source", source, from_device, from, size);
    if (!error && !wait) error = sim_stream_check(stream);
    if (error) return error;
    if (wait || sim_stream_idle(stream)) {
        memmove(to, from, size);
        return 0;
    }
    if (target == PAGEABLE) {
        /* The caller may read pageable memory as soon as the call is back, as with the device. */
        if ((error = sim_stream_wait(stream))) return error;
        memmove(to, from, size);
        return 0;
    }
    struct copy *copy = malloc(sizeof *copy);
    if (!copy) return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: the host has no memory", call);
    *copy = (struct copy){to, from, size, NULL};
    if (source == PAGEABLE) { /* the caller may change pageable memory as soon as the call is back */
        copy->from = copy->staged = malloc(size);
        if (!copy->staged) {
            free(copy);
            return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: the host has no room for %zu bytes", call, size);
        }
        memcpy(copy->staged, from, size);
    }
    return sim_stream_submit(stream, call, run_copy, copy);
}

EXPORT aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind) {
    return do_copy("aclrtMemcpy", to, room, from, size, kind, true, NULL);
}

EXPORT aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind,
                                 aclrtStream stream) {
    return do_copy("aclrtMemcpyAsync", to, room, from, size, kind, false, stream);
}

static int do_batch(const char *call, void **tos, size_t *rooms, void **froms, size_t *sizes, size_t count,
                    size_t *fail_index, bool wait, aclrtStream stream) {
    for (size_t i = 0; i < count; i++) {
        int error = do_copy(call, tos[i], rooms[i], froms[i], sizes[i], ACL_MEMCPY_DEFAULT, wait, stream);
        if (error) {
            if (fail_index) *fail_index = i;
            return error;
        }
    }
    return 0;
}

EXPORT aclError aclrtMemcpyBatch(void **tos, size_t *rooms, void **froms, size_t *sizes, size_t count,
                                 aclrtMemcpyBatchAttr *attributes, size_t *indexes, size_t attribute_count,
                                 size_t *fail_index) {
    (void)attributes, (void)indexes, (void)attribute_count; /* every address says itself where it lies */
    return do_batch("aclrtMemcpyBatch", tos, rooms, froms, sizes, count, fail_index, true, NULL);
}

EXPORT aclError aclrtMemcpyBatchAsync(void **tos, size_t *rooms, void **froms, size_t *sizes, size_t count,
                                      aclrtMemcpyBatchAttr *attributes, size_t *indexes, size_t attribute_count,
                                      size_t *fail_index, aclrtStream stream) {
    (void)attributes, (void)indexes, (void)attribute_count;
    return do_batch("aclrtMemcpyBatchAsync", tos, rooms, froms, sizes, count, fail_index, false, stream);
}

struct fill {
    void *to;
    int value;
    size_t size;
};

static int run_fill(void *argument) {
    struct fill *fill = argument;
    if (!sim_task_cancelled()) memset(fill->to, fill->value, fill->size);
    free(fill);
    return 0;
}

static int do_fill(const char *call, void *to, size_t room, int value, size_t size, bool wait, aclrtStream stream) {
    SIM_TRACE(call, "\"size\": %zu, \"stream\": \"%p\"", size, stream);
    if (!size) return 0;
    if (!to) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: a null pointer", call);
    if (size > room) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "%s: %zu bytes into room for %zu", call, size, room);
    int error = check_device_end(call, "target", place_of(to, size), false, to, size);
    if (!error && !wait) error = sim_stream_check(stream);
    if (error) return error;
    if (wait || sim_stream_idle(stream)) {
        memset(to, value, size);
        return 0;
    }
    struct fill *fill = malloc(sizeof *fill);
    if (!fill) return sim_fail(ACL_ERROR_RT_MEMORY_ALLOCATION, "%s: the host has no memory", call);
    *fill = (struct fill){to, value, size};
    return sim_stream_submit(stream, call, run_fill, fill);
}

EXPORT aclError aclrtMemset(void *to, size_t room, int32_t value, size_t size) {
    return do_fill("aclrtMemset", to, room, value, size, true, NULL);
}

EXPORT aclError aclrtMemsetAsync(void *to, size_t room, int32_t value, size_t size, aclrtStream stream) {
    return do_fill("aclrtMemsetAsync", to, room, value, size, false, stream);
}

/* A hint about caches: results do not depend on it. */
EXPORT aclError aclrtCmoAsync(void *source, size_t size, aclrtCmoType type, aclrtStream stream) {
    SIM_TRACE("aclrtCmoAsync", "\"type\": %d, \"size\": %zu", (int)type, size);
    if (place_of(source, size) != ON_DEVICE)
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "aclrtCmoAsync: %p is not device memory", source);
    return sim_stream_check(stream);
}
