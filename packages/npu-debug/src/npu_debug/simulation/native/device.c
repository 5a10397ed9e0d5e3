/* What a process knows about its simulated devices: settings, errors, trace, contexts, versions, options; and the plain
 * holders (tensor descriptions, operator attributes) that torch_npu fills before a launch that is then refused. */
#define _GNU_SOURCE
#include "sim.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <acl/acl_op_compiler.h>
#include <profiling/aprof_pub.h>

#include "state.h"

/* ---- settings ---- */

/* Plausible numbers of cores and sizes of caches: a simulated program only prints them or divides work by them. The
 * longest prefix of the name counts, so every member of a family has a row. The first three know neither bfloat16 nor
 * infinities. */
static const struct soc {
    const char *prefix;
    int cube, vector, aicpu, l2_mib;
} socs[] = {
    {"Ascend310P", 8, 8, 4, 16},   {"Ascend310B", 1, 1, 4, 4},      {"Ascend910", 32, 32, 14, 32},
    {"Ascend910B1", 24, 48, 6, 192}, {"Ascend910B2", 24, 48, 6, 192}, {"Ascend910B3", 20, 40, 6, 192},
    {"Ascend910B4", 20, 40, 6, 96},  {"Ascend910_93", 24, 48, 6, 192}, {"Ascend910_937", 20, 40, 6, 192},
    {"Ascend910_936", 20, 40, 6, 192}, {"Ascend950", 32, 64, 6, 128},
};
/* The first release whose runtime has every function implemented here: torch_npu takes its current paths with it. */
static const char cann_version[] = "8.5.0", driver_version[] = "25.5.0";

static char soc_name[64] = "Ascend910B1";
static const struct soc *soc = &socs[3];
static int device_count;
static int physical_id[SIM_MAX_DEVICES];
static uint64_t device_memory = 64ull << 30;

static struct context {
    int device;
} primary[SIM_MAX_DEVICES];

bool sim_tracing;
static int trace_file = -1;

static uint64_t number(const char *variable, uint64_t otherwise, uint64_t most) {
    const char *text = getenv(variable);
    if (!text || !*text) return otherwise;
    char *end;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno || *end || !isdigit((unsigned char)*text) || value > most) {
        fprintf(stderr, "simulated device: %s=%s is not a whole number up to %llu; using %llu\n", variable, text,
                (unsigned long long)most, (unsigned long long)otherwise);
        return otherwise;
    }
    return value;
}

/* As the real runtime does: a program sees the listed devices only, up to the first entry that names none. */
static void apply_visible_devices(int all) {
    const char *list = getenv("ASCEND_RT_VISIBLE_DEVICES");
    device_count = 0;
    if (!list || !*list) {
        for (; device_count < all; device_count++) physical_id[device_count] = device_count;
        return;
    }
    while (*list && device_count < all) {
        char *end;
        long id = strtol(list, &end, 10);
        if (end == list || id < 0 || id >= all) break;
        physical_id[device_count++] = (int)id;
        if (*end != ',') break;
        list = end + 1;
    }
}

__attribute__((constructor)) static void read_settings(void) {
    const char *name = getenv("NPU_SIM_SOC");
    if (name && *name) snprintf(soc_name, sizeof soc_name, "%s", name);
    size_t longest = 0;
    for (size_t i = 0; i < sizeof socs / sizeof *socs; i++) {
        size_t length = strlen(socs[i].prefix);
        if (length > longest && strncmp(soc_name, socs[i].prefix, length) == 0) soc = &socs[i], longest = length;
    }
    device_memory = number("NPU_SIM_MEMORY", device_memory, 1ull << 46);
    apply_visible_devices((int)number("NPU_SIM_DEVICES", 8, SIM_MAX_DEVICES));
    for (int device = 0; device < SIM_MAX_DEVICES; device++) primary[device].device = device;
    const char *trace = getenv("NPU_SIM_TRACE");
    if (trace && *trace) {
        trace_file = open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (trace_file < 0) fprintf(stderr, "simulated device: NPU_SIM_TRACE=%s: %s\n", trace, strerror(errno));
        sim_tracing = trace_file >= 0;
    }
}

uint64_t sim_device_memory(void) { return device_memory; }

uint64_t sim_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

double sim_now(void) { return (double)sim_now_ns() * 1e-9; }

/* ---- errors and the trace ---- */

static __thread char message[1024], taken[1024];
static __thread int last_error;

int sim_fail(int code, const char *format, ...) {
    static const char prefix[] = "simulated device: ";
    va_list arguments;
    va_start(arguments, format);
    char text[sizeof message - sizeof prefix];
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    /* An error is passed on from stream to caller: one prefix is enough. */
    bool has_prefix = strncmp(text, prefix, sizeof prefix - 1) == 0;
    snprintf(message, sizeof message, "%s%s", has_prefix ? "" : prefix, text);
    last_error = code;
    SIM_TRACE("error", "\"code\": %d", code);
    return code;
}

const char *sim_message(void) { return message; }

EXPORT const char *aclGetRecentErrMsg(void) {
    /* Reading takes the message away, so that a later error cannot be explained by an earlier one. */
    memcpy(taken, message, sizeof taken);
    message[0] = 0;
    return taken;
}

EXPORT aclError aclrtPeekAtLastError(aclrtLastErrLevel level) {
    return level == ACL_RT_THREAD_LEVEL ? last_error : sim_fail(ACL_ERROR_RT_PARAM_INVALID, "error level %d", level);
}

EXPORT aclError aclrtGetLastError(aclrtLastErrLevel level) {
    aclError error = aclrtPeekAtLastError(level);
    last_error = 0;
    return error;
}

void sim_trace_line(const char *call, const char *fields, ...) {
    char line[2048];
    int length = snprintf(line, sizeof line, "{\"time\": %.6f, \"pid\": %d, \"thread\": %ld, \"call\": \"%s\"",
                          sim_now(), (int)getpid(), syscall(SYS_gettid), call);
    if (*fields) {
        va_list arguments;
        va_start(arguments, fields);
        length += snprintf(line + length, sizeof line - (size_t)length, ", ");
        int written = vsnprintf(line + length, sizeof line - (size_t)length, fields, arguments);
        va_end(arguments);
        /* A line that is cut would not be JSON any more: say that something is missing instead. */
        if (written > (int)sizeof line - length - 3)
            length += snprintf(line + length, sizeof line - (size_t)length, "\"cut\": true");
        else
            length += written;
    }
    line[length++] = '}';
    line[length++] = '\n';
    if (write(trace_file, line, (size_t)length) < 0) sim_tracing = false; /* a full disk must not stop the program */
}

/* Called by the generated functions that stand for what is not implemented. */
int sim_not_implemented(const char *name, int code) {
    SIM_TRACE(name, "\"implemented\": false");
    return sim_fail(code, "%s is not implemented", name);
}

/* ---- devices and contexts ---- */

static __thread struct context *current;
static bool active[SIM_MAX_DEVICES];
static bool initialised;
static uint32_t core_limit[SIM_MAX_DEVICES][2];
static pthread_mutex_t option_lock = PTHREAD_MUTEX_INITIALIZER;

/* The device of threads that choose none; -1: they have none. Configured by the file that aclInit reads. */
static int default_device = -1;

/* Threads that use a device without having chosen one get the default device, as of now. */
int sim_current_device(void) {
    if (!current && default_device >= 0) aclrtSetDevice(default_device);
    return current ? current->device : -1;
}

int sim_check_device(int device) {
    if (device >= 0 && device < device_count) return 0;
    return sim_fail(ACL_ERROR_RT_INVALID_DEVICEID, "device %d does not exist, there are %d (NPU_SIM_DEVICES)", device,
                    device_count);
}

static int core_count(aclrtDevResLimitType type) { return type == ACL_RT_DEV_RES_CUBE_CORE ? soc->cube : soc->vector; }

/* Of the configuration only {"defaultDevice": {"default_device": "0"}} has a meaning here; torch_npu asks for it. */
static int read_configuration(const char *path) {
    FILE *file = fopen(path, "r");
    if (!file) return sim_fail(ACL_ERROR_INVALID_FILE, "aclInit: %s: %s", path, strerror(errno));
    char text[4096];
    size_t length = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[length] = 0;
    const char *found = strstr(text, "\"default_device\"");
    int device;
    if (found && sscanf(found, "\"default_device\" : \"%d", &device) == 1) {
        int error = sim_check_device(device);
        if (error) return error;
        default_device = device;
    }
    return 0;
}

EXPORT aclError aclInit(const char *path) {
    SIM_TRACE("aclInit", "");
    if (__atomic_exchange_n(&initialised, true, __ATOMIC_ACQ_REL))
        return sim_fail(ACL_ERROR_REPEAT_INITIALIZE, "aclInit was called before");
    return path && *path ? read_configuration(path) : 0;
}

EXPORT aclError aclFinalize(void) {
    SIM_TRACE("aclFinalize", "");
    if (!__atomic_exchange_n(&initialised, false, __ATOMIC_ACQ_REL))
        return sim_fail(ACL_ERROR_REPEAT_FINALIZE, "aclFinalize without aclInit");
    sim_cancel_streams(-1);
    default_device = -1;
    return 0;
}

EXPORT aclError aclrtGetDeviceCount(uint32_t *count) {
    SIM_TRACE("aclrtGetDeviceCount", "");
    if (device_count == 0) return sim_fail(ACL_ERROR_RT_NO_DEVICE, "there is no device (NPU_SIM_DEVICES)");
    *count = (uint32_t)device_count;
    return 0;
}

EXPORT aclError aclrtSetDevice(int32_t device) {
    SIM_TRACE("aclrtSetDevice", "\"device\": %d", device);
    int error = sim_check_device(device);
    if (error) return error;
    __atomic_store_n(&active[device], true, __ATOMIC_RELEASE);
    current = &primary[device];
    return 0;
}

/* Streams of the device are given up. Memory stays until its owner frees it: at the end of a process torch_npu resets
 * the devices first, while tensors that are still alive may yet be read. */
EXPORT aclError aclrtResetDevice(int32_t device) {
    SIM_TRACE("aclrtResetDevice", "\"device\": %d", device);
    int error = sim_check_device(device);
    if (error) return error;
    sim_cancel_streams(device);
    sim_forget_default_stream(device);
    __atomic_store_n(&active[device], false, __ATOMIC_RELEASE);
    if (sim_current_device() == device) current = NULL;
    return 0;
}

EXPORT aclError aclrtGetDevice(int32_t *device) {
    SIM_TRACE(__func__, "");
    if (!current && default_device >= 0) {
        *device = default_device; /* asking does not make it this thread's */
        return 0;
    }
    if (!current) return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has not chosen a device (aclrtSetDevice)");
    *device = current->device;
    return 0;
}

EXPORT aclError aclrtGetCurrentContext(aclrtContext *context) {
    SIM_TRACE(__func__, "");
    if (sim_current_device() < 0)
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "this thread has not chosen a device (aclrtSetDevice)");
    *context = current;
    return 0;
}

EXPORT aclError aclrtSetCurrentContext(aclrtContext context) {
    SIM_TRACE(__func__, "");
    struct context *wanted = context;
    if (wanted < primary || wanted >= primary + device_count)
        return sim_fail(ACL_ERROR_RT_CONTEXT_NULL, "%p is not a context", context);
    return aclrtSetDevice((int32_t)(wanted - primary));
}

EXPORT aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t *flags, int32_t *is_active) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device(device);
    if (error) return error;
    if (flags) *flags = 0;
    if (is_active) *is_active = __atomic_load_n(&active[device], __ATOMIC_ACQUIRE);
    return 0;
}

EXPORT const char *aclrtGetSocName(void) {
    SIM_TRACE(__func__, "");
    return soc_name;
}

EXPORT aclError aclGetDeviceCapability(uint32_t device, aclDeviceInfo info, int64_t *value) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device((int)device);
    if (error) return error;
    switch (info) {
    case ACL_DEVICE_INFO_AI_CORE_NUM: *value = soc->cube; return 0;
    case ACL_DEVICE_INFO_VECTOR_CORE_NUM: *value = soc->vector; return 0;
    case ACL_DEVICE_INFO_L2_SIZE: *value = (int64_t)soc->l2_mib << 20; return 0;
    default: return sim_fail(ACL_ERROR_INVALID_PARAM, "aclGetDeviceCapability: kind %d is not known", info);
    }
}

EXPORT aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t *value) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device((int)device);
    if (error) return error;
    switch (attribute) {
    case ACL_DEV_ATTR_AICPU_CORE_NUM: *value = soc->aicpu; return 0;
    case ACL_DEV_ATTR_AICORE_CORE_NUM:
    case ACL_DEV_ATTR_CUBE_CORE_NUM: *value = soc->cube; return 0;
    case ACL_DEV_ATTR_VECTOR_CORE_NUM: *value = soc->vector; return 0;
    case ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: *value = (int64_t)device_memory; return 0;
    case ACL_DEV_ATTR_L2_CACHE_SIZE: *value = (int64_t)soc->l2_mib << 20; return 0;
    case ACL_DEV_ATTR_SMP_ID: *value = 0; return 0;
    case ACL_DEV_ATTR_PHY_CHIP_ID: *value = physical_id[device]; return 0;
    case ACL_DEV_ATTR_IS_VIRTUAL: *value = 0; return 0;
    default: return sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "aclrtGetDeviceInfo: no attribute %d", attribute);
    }
}

EXPORT aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logic) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device(user);
    if (!error) *logic = user;
    return error;
}

EXPORT aclError aclrtDeviceGetBareTgid(int32_t *pid) {
    SIM_TRACE(__func__, "");
    *pid = (int32_t)getpid();
    return 0;
}

EXPORT aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device(device);
    if (error) return error;
    char text[sizeof uuid->bytes + 1];
    snprintf(text, sizeof text, "NPUSIMULATOR%04d", physical_id[device]);
    memcpy(uuid->bytes, text, sizeof uuid->bytes);
    return 0;
}

EXPORT aclError aclrtGetDeviceUtilizationRate(int32_t device, aclrtUtilizationInfo *info) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device(device);
    if (error) return error;
    /* No core of a device works here; only its memory is really in use. */
    info->cubeUtilization = info->vectorUtilization = info->aicpuUtilization = 0;
    info->memoryUtilization = device_memory ? (int32_t)(sim_memory_used(device) * 100 / device_memory) : 0;
    return 0;
}

EXPORT aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device(device);
    if (!error) error = sim_check_device(peer);
    if (!error) *can = device != peer;
    return error;
}

EXPORT aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags) {
    SIM_TRACE(__func__, "");
    (void)flags; /* memory of every device is memory of this process */
    return sim_check_device(peer);
}

/* Memory of the host does not report errors of a device's memory, so there are none to list. */
EXPORT aclError aclrtGetMemUceInfo(int32_t device, aclrtMemUceInfo *infos, size_t size, size_t *count) {
    SIM_TRACE(__func__, "");
    (void)infos, (void)size;
    *count = 0;
    return sim_check_device(device);
}

EXPORT aclError aclrtGetErrorVerbose(int32_t device, aclrtErrorInfo *info) {
    SIM_TRACE(__func__, "");
    memset(info, 0, sizeof *info);
    info->errorType = ACL_RT_NO_ERROR;
    return sim_check_device(device);
}

/* ---- limits of cores ---- */

EXPORT aclError aclrtGetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t *value) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device(device);
    if (error) return error;
    if (type > ACL_RT_DEV_RES_VECTOR_CORE) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "no resource %d", type);
    uint32_t limit = core_limit[device][type];
    *value = limit ? limit : (uint32_t)core_count(type);
    return 0;
}

int sim_check_core_limit(aclrtDevResLimitType type, uint32_t value) {
    if (type > ACL_RT_DEV_RES_VECTOR_CORE) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "no resource %d", type);
    if (value == 0 || value > (uint32_t)core_count(type))
        return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "a limit of %u cores: there are %d", value, core_count(type));
    return 0;
}

EXPORT aclError aclrtSetDeviceResLimit(int32_t device, aclrtDevResLimitType type, uint32_t value) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device(device);
    if (!error) error = sim_check_core_limit(type, value);
    if (!error) core_limit[device][type] = value;
    return error;
}

EXPORT aclError aclrtResetDeviceResLimit(int32_t device) {
    SIM_TRACE(__func__, "");
    int error = sim_check_device(device);
    if (!error) core_limit[device][0] = core_limit[device][1] = 0;
    return error;
}

/* ---- versions, attributes, options ---- */

EXPORT aclError aclsysGetCANNVersion(aclCANNPackageName name, aclCANNPackageVersion *version) {
    SIM_TRACE(__func__, "");
    memset(version, 0, sizeof *version);
    const char *text = name == ACL_PKG_NAME_DRIVER ? driver_version : cann_version;
    snprintf(version->version, sizeof version->version, "%s", text);
    sscanf(text, "%63[^.].%63[^.].%63s", version->majorVersion, version->minorVersion, version->releaseVersion);
    return 0;
}

/* Every package is of the one release. */
EXPORT aclError aclsysGetVersionStr(char *package, char *version) {
    SIM_TRACE(__func__, "");
    if (!package || !version) return sim_fail(ACL_ERROR_INVALID_PARAM, "aclsysGetVersionStr: a null pointer");
    strcpy(version, strcasecmp(package, "driver") == 0 ? driver_version : cann_version);
    return 0;
}

static bool is_modern(void) { return soc > &socs[2]; }

EXPORT aclError aclGetCannAttribute(aclCannAttr attribute, int32_t *value) {
    SIM_TRACE(__func__, "");
    switch (attribute) {
    case ACL_CANN_ATTR_INF_NAN:
    case ACL_CANN_ATTR_BF16: *value = is_modern(); return 0;
    case ACL_CANN_ATTR_JIT_COMPILE: *value = 0; return 0; /* there is no operator compiler */
    default: return sim_fail(ACL_ERROR_INVALID_PARAM, "CANN attribute %d is not known", attribute);
    }
}

EXPORT aclError aclGetCannAttributeList(const aclCannAttr **list, size_t *count) {
    SIM_TRACE(__func__, "");
    static const aclCannAttr known[] = {ACL_CANN_ATTR_INF_NAN, ACL_CANN_ATTR_BF16};
    *list = known;
    *count = is_modern() ? 2 : 0;
    return 0;
}

static char compile_options[ACL_OP_DEBUG_OPTION + 1][256] = {[ACL_OP_JIT_COMPILE] = "disable"};

EXPORT aclError aclSetCompileopt(aclCompileOpt option, const char *value) {
    SIM_TRACE(__func__, "");
    if (option > ACL_OP_DEBUG_OPTION || !value || strlen(value) >= sizeof *compile_options)
        return sim_fail(ACL_ERROR_INVALID_PARAM, "aclSetCompileopt: option %d", option);
    pthread_mutex_lock(&option_lock);
    strcpy(compile_options[option], value);
    pthread_mutex_unlock(&option_lock);
    return 0;
}

EXPORT size_t aclGetCompileoptSize(aclCompileOpt option) {
    SIM_TRACE(__func__, "");
    if (option > ACL_OP_DEBUG_OPTION) return 0;
    pthread_mutex_lock(&option_lock);
    size_t size = strlen(compile_options[option]) + 1;
    pthread_mutex_unlock(&option_lock);
    return size;
}

EXPORT aclError aclGetCompileopt(aclCompileOpt option, char *value, size_t length) {
    SIM_TRACE(__func__, "");
    if (option > ACL_OP_DEBUG_OPTION || !value || length < aclGetCompileoptSize(option))
        return sim_fail(ACL_ERROR_INVALID_PARAM, "aclGetCompileopt: option %d, length %zu", option, length);
    pthread_mutex_lock(&option_lock);
    strcpy(value, compile_options[option]);
    pthread_mutex_unlock(&option_lock);
    return 0;
}

static int64_t system_options[ACL_OPT_STRONG_CONSISTENCY + 1];

EXPORT aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    SIM_TRACE(__func__, "");
    if (option > ACL_OPT_STRONG_CONSISTENCY) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "no option %d", option);
    system_options[option] = value;
    return 0;
}

EXPORT aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t *value) {
    SIM_TRACE(__func__, "");
    if (option > ACL_OPT_STRONG_CONSISTENCY) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "no option %d", option);
    *value = system_options[option];
    return 0;
}

EXPORT aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
    return aclrtSetSysParamOpt(option, value);
}

static aclrtFloatOverflowMode overflow_mode = ACL_RT_OVERFLOW_MODE_SATURATION;

EXPORT aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode mode) {
    SIM_TRACE(__func__, "");
    if (mode >= ACL_RT_OVERFLOW_MODE_UNDEF) return sim_fail(ACL_ERROR_RT_PARAM_INVALID, "overflow mode %d", mode);
    overflow_mode = mode;
    return 0;
}

EXPORT aclError aclrtGetDeviceSatMode(aclrtFloatOverflowMode *mode) {
    SIM_TRACE(__func__, "");
    *mode = overflow_mode;
    return 0;
}

/* A kernel runs on the host to its end, so no time-out can strike it; the value is taken as the device takes it. */
EXPORT aclError aclrtSetOpExecuteTimeOut(uint32_t seconds) {
    SIM_TRACE("aclrtSetOpExecuteTimeOut", "\"seconds\": %u", seconds);
    return 0;
}

EXPORT aclError aclrtSetOpExecuteTimeOutV2(uint64_t microseconds, uint64_t *actual) {
    SIM_TRACE("aclrtSetOpExecuteTimeOutV2", "\"microseconds\": %llu", (unsigned long long)microseconds);
    if (actual) *actual = microseconds;
    return 0;
}

/* ---- log and profiler: no collector is attached, so a registration succeeds and a report has no reader ---- */

EXPORT void aclAppLog(aclLogLevel level, const char *function, const char *file, uint32_t line, const char *format,
                      ...) {
    const char *to_stdout = getenv("ASCEND_SLOG_PRINT_TO_STDOUT"), *least = getenv("ASCEND_GLOBAL_LOG_LEVEL");
    if (!to_stdout || strcmp(to_stdout, "1") || (int)level < (least && *least ? atoi(least) : ACL_ERROR)) return;
    static const char *const names[] = {"DEBUG", "INFO", "WARNING", "ERROR"};
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    const char *base = strrchr(file, '/');
    printf("[%s] APP(%d) %s:%u %s: %s\n", names[level & 3], (int)getpid(), base ? base + 1 : file, line, function,
           text);
    fflush(stdout);
}

EXPORT int32_t MsprofRegisterCallback(uint32_t module, ProfCommandHandle handle) {
    (void)module, (void)handle;
    return MSPROF_ERROR_NONE;
}

EXPORT int32_t MsprofReportApi(uint32_t aging, const struct MsprofApi *api) {
    (void)aging, (void)api;
    return MSPROF_ERROR_NONE;
}

EXPORT int32_t MsprofReportCompactInfo(uint32_t aging, const VOID_PTR data, uint32_t length) {
    (void)aging, (void)data, (void)length;
    return MSPROF_ERROR_NONE;
}

EXPORT int32_t MsprofReportAdditionalInfo(uint32_t aging, const VOID_PTR data, uint32_t length) {
    (void)aging, (void)data, (void)length;
    return MSPROF_ERROR_NONE;
}

EXPORT uint64_t MsprofGetHashId(const char *text, size_t length) {
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < length; i++) hash = (hash ^ (uint8_t)text[i]) * 1099511628211u;
    return hash;
}

EXPORT uint64_t MsprofSysCycleTime(void) { return sim_now_ns(); }

/* ---- graphs: a kernel here runs at issue, so a capture would run it once and replay nothing ---- */

EXPORT aclError aclmdlRICaptureBegin(aclrtStream stream, aclmdlRICaptureMode mode) {
    SIM_TRACE("aclmdlRICaptureBegin", "");
    (void)stream, (void)mode;
    /* (torch_npu takes ACL_ERROR_RT_FEATURE_NOT_SUPPORT for a driver that is too old and drops this message) */
    return sim_fail(ACL_ERROR_API_NOT_SUPPORT, "a graph cannot be captured: kernels run on the host when they are "
                                               "issued, so a replay would do nothing");
}

EXPORT aclError aclmdlRICaptureGetInfo(aclrtStream stream, aclmdlRICaptureStatus *status, aclmdlRI *model) {
    SIM_TRACE(__func__, "");
    (void)stream;
    if (status) *status = ACL_MODEL_RI_CAPTURE_STATUS_NONE;
    if (model) *model = NULL;
    return 0;
}

EXPORT aclError aclmdlRICaptureThreadExchangeMode(aclmdlRICaptureMode *mode) {
    SIM_TRACE(__func__, "");
    static __thread aclmdlRICaptureMode kept = ACL_MODEL_RI_CAPTURE_MODE_GLOBAL;
    aclmdlRICaptureMode before = kept;
    kept = *mode;
    *mode = before;
    return 0;
}

/* ---- single operators: torch_npu describes a launch first; the launch is refused with the operator's name ---- */

#define MAX_DIMENSIONS 64

struct aclTensorDesc {
    aclDataType type;
    aclFormat format;
    int dimensions;
    int64_t sizes[MAX_DIMENSIONS];
    char name[128];
};

struct aclDataBuffer {
    void *data;
    size_t size;
};

/* Attributes are only ever read by a kernel that does not exist: nothing is kept of them. */
struct aclopAttr {
    int count;
};

static int set_shape(aclTensorDesc *description, int dimensions, const int64_t *sizes) {
    if (!description || dimensions < 0 || dimensions > MAX_DIMENSIONS || (dimensions && !sizes))
        return sim_fail(ACL_ERROR_INVALID_PARAM, "a tensor description with %d dimensions", dimensions);
    description->dimensions = dimensions;
    if (dimensions) memcpy(description->sizes, sizes, (size_t)dimensions * sizeof *sizes);
    return 0;
}

EXPORT aclTensorDesc *aclCreateTensorDesc(aclDataType type, int dimensions, const int64_t *sizes, aclFormat format) {
    aclTensorDesc *description = calloc(1, sizeof *description);
    if (!description) return NULL;
    description->type = type;
    description->format = format;
    if (set_shape(description, dimensions, sizes)) {
        free(description);
        return NULL;
    }
    return description;
}

EXPORT void aclDestroyTensorDesc(const aclTensorDesc *description) { free((void *)description); }
EXPORT aclDataType aclGetTensorDescType(const aclTensorDesc *d) { return d ? d->type : ACL_DT_UNDEFINED; }
EXPORT aclFormat aclGetTensorDescFormat(const aclTensorDesc *d) { return d ? d->format : ACL_FORMAT_UNDEFINED; }
EXPORT size_t aclGetTensorDescNumDims(const aclTensorDesc *d) { return d ? (size_t)d->dimensions : 0; }

EXPORT aclError aclGetTensorDescDimV2(const aclTensorDesc *description, size_t index, int64_t *size) {
    if (!description || index >= (size_t)description->dimensions)
        return sim_fail(ACL_ERROR_INVALID_PARAM, "dimension %zu of a tensor description", index);
    *size = description->sizes[index];
    return 0;
}

EXPORT void aclSetTensorDescName(aclTensorDesc *description, const char *name) {
    if (description) snprintf(description->name, sizeof description->name, "%s", name ? name : "");
}

/* Storage format, storage shape and placement matter to a kernel only. */
EXPORT aclError aclSetTensorFormat(aclTensorDesc *description, aclFormat format) {
    (void)format;
    return description ? 0 : sim_fail(ACL_ERROR_INVALID_PARAM, "no tensor description");
}

EXPORT aclError aclSetTensorShape(aclTensorDesc *description, int dimensions, const int64_t *sizes) {
    (void)dimensions, (void)sizes;
    return description ? 0 : sim_fail(ACL_ERROR_INVALID_PARAM, "no tensor description");
}

EXPORT aclError aclSetTensorPlaceMent(aclTensorDesc *description, aclMemType type) {
    (void)type;
    return description ? 0 : sim_fail(ACL_ERROR_INVALID_PARAM, "no tensor description");
}

EXPORT aclDataBuffer *aclCreateDataBuffer(void *data, size_t size) {
    aclDataBuffer *buffer = malloc(sizeof *buffer);
    if (buffer) *buffer = (aclDataBuffer){data, size};
    return buffer;
}

EXPORT aclError aclDestroyDataBuffer(const aclDataBuffer *buffer) {
    free((void *)buffer);
    return 0;
}

EXPORT aclopAttr *aclopCreateAttr(void) { return calloc(1, sizeof(aclopAttr)); }
EXPORT void aclopDestroyAttr(const aclopAttr *attributes) { free((void *)attributes); }

static aclError set_attribute(aclopAttr *attributes, const char *name) {
    if (!attributes || !name) return sim_fail(ACL_ERROR_INVALID_PARAM, "an operator attribute without a name");
    attributes->count++;
    return 0;
}

#define ATTRIBUTE(suffix, ...) \
    EXPORT aclError aclopSetAttr##suffix(aclopAttr *attributes, const char *name, __VA_ARGS__)
#define IGNORED __attribute__((unused))

ATTRIBUTE(Bool, IGNORED uint8_t value) { return set_attribute(attributes, name); }
ATTRIBUTE(DataType, IGNORED aclDataType value) { return set_attribute(attributes, name); }
ATTRIBUTE(Float, IGNORED float value) { return set_attribute(attributes, name); }
ATTRIBUTE(Int, IGNORED int64_t value) { return set_attribute(attributes, name); }
ATTRIBUTE(String, IGNORED const char *value) { return set_attribute(attributes, name); }
ATTRIBUTE(ListBool, IGNORED int count, IGNORED const uint8_t *values) { return set_attribute(attributes, name); }
ATTRIBUTE(ListFloat, IGNORED int count, IGNORED const float *values) { return set_attribute(attributes, name); }
ATTRIBUTE(ListInt, IGNORED int count, IGNORED const int64_t *values) { return set_attribute(attributes, name); }
ATTRIBUTE(ListListInt, IGNORED int lists, IGNORED const int *counts, IGNORED const int64_t *const values[]) {
    return set_attribute(attributes, name);
}

static int refuse_operator(const char *call, const char *type) {
    SIM_TRACE(call, "\"operator\": \"%s\", \"implemented\": false", type);
    return sim_fail(ACL_ERROR_RT_FEATURE_NOT_SUPPORT, "%s: operator %s has no kernel here", call, type);
}

/* Fill(sizes, value): torch_npu zeroes buffers of its own with it, below the dispatcher. */
struct fill {
    aclDataBuffer value, out;
};

static int run_fill(void *argument) {
    struct fill *fill = argument;
    for (size_t done = 0; done + fill->value.size <= fill->out.size; done += fill->value.size)
        memcpy((char *)fill->out.data + done, fill->value.data, fill->value.size);
    free(fill);
    return 0;
}

/* PadV3(x, paddings, value): torch_npu pads what it gathers to the device's alignment. Rows are copied one by one. */
struct pad {
    aclDataBuffer x, out;
    size_t element;
    int dimensions;
    int64_t sizes[MAX_DIMENSIONS], before[MAX_DIMENSIONS], out_sizes[MAX_DIMENSIONS];
    char value[16];
};

static int run_pad(void *argument) {
    struct pad *pad = argument;
    for (size_t done = 0; done + pad->element <= pad->out.size; done += pad->element)
        memcpy((char *)pad->out.data + done, pad->value, pad->element);
    size_t row = (size_t)pad->sizes[pad->dimensions - 1] * pad->element;
    for (size_t number = 0; row && number < pad->x.size / row; number++) {
        size_t left = number, offset = (size_t)pad->before[pad->dimensions - 1], stride = 1;
        for (int d = pad->dimensions - 2; d >= 0; d--) {
            stride *= (size_t)pad->out_sizes[d + 1];
            offset += ((size_t)pad->before[d] + left % (size_t)pad->sizes[d]) * stride;
            left /= (size_t)pad->sizes[d];
        }
        memcpy((char *)pad->out.data + offset * pad->element, (char *)pad->x.data + number * row, row);
    }
    free(pad);
    return 0;
}

static int64_t integer_at(const aclDataBuffer *buffer, aclDataType type, int index) {
    return type == ACL_INT32 ? ((const int32_t *)buffer->data)[index] : ((const int64_t *)buffer->data)[index];
}

static aclError submit_pad(const aclTensorDesc *const described[], const aclDataBuffer *const inputs[],
                           const aclTensorDesc *out_described, const aclDataBuffer *out, aclrtStream stream) {
    const aclTensorDesc *x = described[0];
    struct pad *pad = calloc(1, sizeof *pad);
    if (!pad) return sim_fail(ACL_ERROR_BAD_ALLOC, "out of host memory");
    *pad = (struct pad){.x = *inputs[0], .out = *out, .element = inputs[2]->size, .dimensions = x->dimensions};
    size_t elements = 1, out_elements = 1;
    bool right = x->dimensions > 0 && x->dimensions == out_described->dimensions && pad->element &&
                 pad->element <= sizeof pad->value;
    for (int d = 0; right && d < x->dimensions; d++) {
        int64_t before = integer_at(inputs[1], described[1]->type, 2 * d);
        int64_t after = integer_at(inputs[1], described[1]->type, 2 * d + 1);
        pad->sizes[d] = x->sizes[d];
        pad->before[d] = before;
        pad->out_sizes[d] = out_described->sizes[d];
        right = before >= 0 && after >= 0 && pad->out_sizes[d] == before + x->sizes[d] + after;
        elements *= (size_t)x->sizes[d];
        out_elements *= (size_t)pad->out_sizes[d];
    }
    if (!right || elements * pad->element != pad->x.size || out_elements * pad->element > pad->out.size) {
        free(pad);
        return sim_fail(ACL_ERROR_INVALID_PARAM, "PadV3 whose sizes disagree");
    }
    memcpy(pad->value, inputs[2]->data, pad->element);
    return sim_stream_submit(stream, "PadV3", run_pad, pad);
}

EXPORT aclError aclopCompileAndExecute(const char *type, int numInputs, const aclTensorDesc *const inputDesc[],
                                       const aclDataBuffer *const inputs[], int numOutputs,
                                       const aclTensorDesc *const outputDesc[], aclDataBuffer *const outputs[],
                                       IGNORED const aclopAttr *attr, IGNORED aclopEngineType engine,
                                       IGNORED aclopCompileType flag, IGNORED const char *path, aclrtStream stream) {
    if (type && !strcmp(type, "Fill") && numInputs == 2 && numOutputs == 1 && inputs[1]->size &&
        inputDesc[1]->type == outputDesc[0]->type) {
        struct fill *fill = malloc(sizeof *fill + inputs[1]->size);
        if (!fill) return sim_fail(ACL_ERROR_BAD_ALLOC, "out of host memory");
        /* The scalar belongs to the caller and may be gone when the stream gets here. */
        *fill = (struct fill){{fill + 1, inputs[1]->size}, *outputs[0]};
        memcpy(fill + 1, inputs[1]->data, inputs[1]->size);
        return sim_stream_submit(stream, "Fill", run_fill, fill);
    }
    if (type && !strcmp(type, "PadV3") && numInputs == 3 && numOutputs == 1)
        return submit_pad(inputDesc, inputs, outputDesc[0], outputs[0], stream);
    return refuse_operator("aclopCompileAndExecute", type);
}

EXPORT aclError aclopCompileAndExecuteV2(const char *type, IGNORED int numInputs, IGNORED aclTensorDesc *inputDesc[],
                                         IGNORED aclDataBuffer *inputs[], IGNORED int numOutputs,
                                         IGNORED aclTensorDesc *outputDesc[], IGNORED aclDataBuffer *outputs[],
                                         IGNORED aclopAttr *attr, IGNORED aclopEngineType engine,
                                         IGNORED aclopCompileType flag, IGNORED const char *path,
                                         IGNORED aclrtStream stream) {
    return refuse_operator("aclopCompileAndExecuteV2", type);
}

EXPORT aclError aclGenGraphAndDumpForOp(const char *type, IGNORED int numInputs,
                                        IGNORED const aclTensorDesc *const inputDesc[],
                                        IGNORED const aclDataBuffer *const inputs[], IGNORED int numOutputs,
                                        IGNORED const aclTensorDesc *const outputDesc[],
                                        IGNORED aclDataBuffer *const outputs[], IGNORED const aclopAttr *attr,
                                        IGNORED aclopEngineType engine, IGNORED const char *path,
                                        IGNORED const aclGraphDumpOption *option) {
    return refuse_operator("aclGenGraphAndDumpForOp", type);
}
