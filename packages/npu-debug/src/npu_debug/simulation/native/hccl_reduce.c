/* Arithmetic of the reductions. Sources are combined in rank order whoever computes, so every rank gets the same bits.
 * Half types are added up in float32 and rounded once. */
#ifndef __clang__
/* These loops are worth vectorising, whatever the rest of the library is built with; nobody looks at the exception
 * flags of floating point. */
#pragma GCC optimize("O3", "no-trapping-math")
#endif

#include <string.h>

#include "hccl_sim.h"

static const struct { const char *name; size_t bytes; } TYPES[] = {
    [HCCL_INT8] = {"int8", 1}, [HCCL_INT16] = {"int16", 2}, [HCCL_INT32] = {"int32", 4}, [HCCL_FP16] = {"fp16", 2},
    [HCCL_FP32] = {"fp32", 4}, [HCCL_INT64] = {"int64", 8}, [HCCL_UINT64] = {"uint64", 8}, [HCCL_UINT8] = {"uint8", 1},
    [HCCL_UINT16] = {"uint16", 2}, [HCCL_UINT32] = {"uint32", 4}, [HCCL_FP64] = {"fp64", 8},
    [HCCL_BFP16] = {"bfp16", 2}, [HCCL_INT128] = {"int128", 16}, [HCCL_HIF8] = {"hif8", 1},
    [HCCL_FP8E4M3] = {"fp8e4m3", 1},
    [HCCL_FP8E5M2] = {"fp8e5m2", 1}, [HCCL_FP8E8M0] = {"fp8e8m0", 1},
};

enum { TYPE_NUMBER = sizeof TYPES / sizeof TYPES[0] };

size_t hccl_type_bytes(int type) {
    return type >= 0 && type < TYPE_NUMBER ? TYPES[type].bytes : 0;
}

const char *hccl_type_name(int type) {
    return hccl_type_bytes(type) ? TYPES[type].name : "unknown";
}

const char *hccl_reduce_name(int op) {
    static const char *const names[] = {"sum", "prod", "max", "min"};
    return op >= 0 && op < 4 ? names[op] : "unknown";
}

bool hccl_can_reduce(int type, int op) {
    return type >= 0 && type <= HCCL_BFP16 && op >= HCCL_REDUCE_SUM && op <= HCCL_REDUCE_MIN;
}

static inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float load_bfp16(uint16_t x) {
    return float_of((int32_t)((uint32_t)x << 16));
}

static inline uint16_t store_bfp16(float x) {
    uint32_t bits = (uint32_t)bits_of(x);
    /* Rounding could carry a NaN into an infinity. */
    return x != x ? (uint16_t)(bits >> 16 | 0x40) : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float load_fp16(uint16_t x) {
    int32_t magnitude = (x & 0x7fff) << 13, sign = (int32_t)((uint32_t)(x & 0x8000) << 16);
    /* A subnormal half is a normal float; the detour keeps clear of subnormal floats, which may be flushed to zero. */
    int32_t subnormal = bits_of(float_of(magnitude + (113 << 23)) - float_of(113 << 23));
    int32_t bits = magnitude < 0x400 << 13 ? subnormal : magnitude + (112 << 23);
    bits = magnitude >= 0x7c00 << 13 ? magnitude | 0x7f800000 : bits;
    return float_of(sign | bits);
}

static inline uint16_t store_fp16(float x) {
    int32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    /* All cases are computed and one is chosen: without branches the loop is vectorised. */
    int32_t half = (magnitude - (112 << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    int32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);    /* the sum rounds to the last bit */
    half = magnitude < 113 << 23 ? subnormal : half;    /* below 2^-14 */
    half = magnitude >= 143 << 23 ? 0x7c00 : half;      /* from 2^16 */
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    return (uint16_t)(sign | half);
}

/* Signed overflow wraps, as in torch; hence the unsigned arithmetic of at least 32 bits. */
#define SUM(wide, a, b) ((wide)(a) + (wide)(b))
#define PROD(wide, a, b) ((wide)(a) * (wide)(b))
/* A NaN on either side is the result. */
#define MAX(wide, a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define MIN(wide, a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define SAME(x) (x)

enum { BLOCK = 512 };

#define FOLD(operator, type, sum, wide, load)                                                                   \
    for (uint32_t s = 1; s < number; s++) {                                                                     \
        const type *source = (const type *)sources[s] + start;                                                  \
        for (size_t i = 0; i < length; i++) {                                                                   \
            sum value = load(source[i]);                                                                        \
            block[i] = (sum)operator(wide, block[i], value);                                                    \
        }                                                                                                       \
    }                                                                                                           \
    break

#define REDUCE(name, type, sum, wide, load, store)                                                              \
    static void name(void *target, const void *const *sources, uint32_t number, size_t count, int op)           \
    {                                                                                                           \
        sum block[BLOCK];                                                                                       \
        for (size_t start = 0; start < count; start += BLOCK) {                                                 \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                      \
            for (size_t i = 0; i < length; i++)                                                                 \
                block[i] = load(((const type *)sources[0])[start + i]);                                         \
            switch (op) {                                                                                       \
            case HCCL_REDUCE_SUM: FOLD(SUM, type, sum, wide, load);                                             \
            case HCCL_REDUCE_PROD: FOLD(PROD, type, sum, wide, load);                                           \
            case HCCL_REDUCE_MAX: FOLD(MAX, type, sum, wide, load);                                             \
            case HCCL_REDUCE_MIN: FOLD(MIN, type, sum, wide, load);                                             \
            }                                                                                                   \
            for (size_t i = 0; i < length; i++)                                                                 \
                ((type *)target)[start + i] = store(block[i]);                                                  \
        }                                                                                                       \
    }

REDUCE(reduce_int8, int8_t, int8_t, uint32_t, SAME, SAME)
REDUCE(reduce_int16, int16_t, int16_t, uint32_t, SAME, SAME)
REDUCE(reduce_int32, int32_t, int32_t, uint32_t, SAME, SAME)
REDUCE(reduce_int64, int64_t, int64_t, uint64_t, SAME, SAME)
REDUCE(reduce_uint8, uint8_t, uint8_t, uint32_t, SAME, SAME)
REDUCE(reduce_uint16, uint16_t, uint16_t, uint32_t, SAME, SAME)
REDUCE(reduce_uint32, uint32_t, uint32_t, uint32_t, SAME, SAME)
REDUCE(reduce_uint64, uint64_t, uint64_t, uint64_t, SAME, SAME)
REDUCE(reduce_fp32, float, float, float, SAME, SAME)
REDUCE(reduce_fp64, double, double, double, SAME, SAME)
REDUCE(reduce_fp16, uint16_t, float, float, load_fp16, store_fp16)
REDUCE(reduce_bfp16, uint16_t, float, float, load_bfp16, store_bfp16)

void hccl_reduce(void *target, const void *const *sources, uint32_t number, size_t count, int type, int op) {
    static void (*const reduce[])(void *, const void *const *, uint32_t, size_t, int) = {
        [HCCL_INT8] = reduce_int8, [HCCL_INT16] = reduce_int16, [HCCL_INT32] = reduce_int32, [HCCL_FP16] = reduce_fp16,
        [HCCL_FP32] = reduce_fp32, [HCCL_INT64] = reduce_int64, [HCCL_UINT64] = reduce_uint64,
        [HCCL_UINT8] = reduce_uint8, [HCCL_UINT16] = reduce_uint16, [HCCL_UINT32] = reduce_uint32,
        [HCCL_FP64] = reduce_fp64, [HCCL_BFP16] = reduce_bfp16,
    };
    reduce[type](target, sources, number, count, op);
}
