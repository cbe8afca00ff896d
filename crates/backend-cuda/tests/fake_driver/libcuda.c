/* A driver without a GPU: just enough of libcuda.so.1 to see which calls the backend makes, in which order, on what,
 * and to fail any of them. Built by the test with the machine's C compiler.
 *
 * It is stricter than the real one: a call that needs a current context refuses to work without, a call that destroys
 * a global capture from a thread that is not in relaxed mode does so, and giving something back twice is counted as
 * a violation. -DOLD leaves out what drivers of CUDA 10 did not have; -DNOTHING leaves out everything.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifdef NOTHING
int nothing_of_nvidias(void) { return 0; }
#else

typedef uint32_t result;
typedef uint64_t address;

enum { GLOBAL = 0, RELAXED = 2 };
enum { SAFE = 1, NEEDS_CONTEXT = 2, NEVER_FAILS = 4 };
enum kind { NONE, PLAIN, PHYSICAL, RESERVED, MAPPED, OPENED, EVENT, STREAM, HOST, REGISTERED, POOL, MANAGED, PINNED,
            FOREIGN, MEMPOOL, KINDS };

struct object {
    enum kind kind;
    address key;
    uint64_t len;
    uint64_t count;  /* references of physical memory, openings of a handle, exportability of foreign memory */
    int device;
    uint32_t flags;
    address other;   /* the physical memory of a mapping */
};

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static struct object objects[4096];
static address next_address = 0x7f0000000000ull, next_number = 0x1000;
static int violations, pending;
static char trace[1 << 16];
static char placed[1 << 16];           /* calls about streams: name, stream, device of the current context (-1: none) */
static long countdown;                 /* the call that fails, counted down; 0: none */
static result countdown_code;
static char named[64], failed[64];
static result named_code;
static int deinitialized;              /* as at the end of a process */
static int capture;                    /* 0 none, 1 under way, 2 destroyed */
static int retained[8];
static char contexts[8];               /* their addresses are the contexts */
static char foreign_context;           /* one that the application made on device 0 */
static uint64_t last_device_count;

static __thread void *stack[16];
static __thread int depth;
static __thread uint32_t mode = GLOBAL;

static int number_of_devices(void) {
    const char *text = getenv("FAKE_DEVICES");
    return text ? atoi(text) : 1;
}

static void *current(void) { return depth ? stack[depth - 1] : NULL; }

static int device_of(void *context) {
    return context == (void *)&foreign_context ? 0 : (int)((char *)context - contexts);
}

static result enter(const char *name, int how) {
    pthread_mutex_lock(&lock);
    size_t used = strlen(trace);
    snprintf(trace + used, sizeof trace - used, "%s ", name);
    result code = 0;
    if (deinitialized) {
        code = 4;
    } else if (named_code && !strcmp(named, name)) {
        code = named_code;
        named_code = 0;
        snprintf(failed, sizeof failed, "%s", name);
    } else if (countdown && !(how & NEVER_FAILS) && --countdown == 0) {
        code = countdown_code;
        snprintf(failed, sizeof failed, "%s", name);
    } else if (capture == 1 && mode != RELAXED && !(how & SAFE)) {
        capture = 2;
        code = 900;
    } else if ((how & NEEDS_CONTEXT) && !current()) {
        code = 201;
    }
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER(how) \
    do { \
        result code_ = enter(__func__, how); \
        if (code_) return code_; \
    } while (0)

static struct object *add(enum kind kind, address key, uint64_t len) {
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++) {
        if (objects[i].kind == NONE) {
            objects[i] = (struct object){ .kind = kind, .key = key, .len = len, .count = 1 };
            objects[i].device = current() ? device_of(current()) : 0;
            return &objects[i];
        }
    }
    abort();
}

static struct object *find(enum kind kind, address key) {
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++)
        if (objects[i].kind == kind && objects[i].key == key) return &objects[i];
    return NULL;
}

static struct object *around(address inside) {
    static const enum kind kinds[] = { PLAIN, MAPPED, OPENED, POOL, MANAGED, PINNED, FOREIGN };
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++)
        for (unsigned k = 0; k < sizeof kinds / sizeof *kinds; k++)
            if (objects[i].kind == kinds[k] && inside - objects[i].key < objects[i].len) return &objects[i];
    return NULL;
}

/* Whether anything is mapped within a range. */
__attribute__((unused)) static int mapped_within(address base, uint64_t len) {
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++) {
        struct object *o = &objects[i];
        if (o->kind == MAPPED && o->key < base + len && base < o->key + o->len) return 1;
    }
    return 0;
}

static result give_back(enum kind kind, address key) {
    struct object *o = find(kind, key);
    if (!o) {
        violations++;
        return 1;
    }
    o->kind = NONE;
    return 0;
}

static address take_addresses(uint64_t len) {
    address base = next_address;
    next_address += (len + 0x1fffff) / 0x200000 * 0x200000 + 0x200000;
    return base;
}

__attribute__((unused)) static void drop_physical(address key) {
    struct object *o = find(PHYSICAL, key);
    if (!o) violations++;
    else if (--o->count == 0) o->kind = NONE;
}

/* What the test asks. */

void fake_fail_nth(long nth, result code) { countdown = nth; countdown_code = code; failed[0] = 0; }
void fake_fail_call(const char *name, result code) {
    snprintf(named, sizeof named, "%s", name);
    named_code = code;
    failed[0] = 0;
}
const char *fake_failed(void) { return failed; }
const char *fake_trace(void) { return trace; }
const char *fake_placed(void) { return placed; }
void fake_clear_trace(void) { trace[0] = placed[0] = 0; }
int fake_violations(void) { return violations; }
int fake_depth(void) { return depth; }
uint32_t fake_mode(void) { return mode; }
void fake_set_mode(uint32_t to) { mode = to; }
void fake_deinitialize(void) { deinitialized = 1; }
void fake_set_capture(int to) { capture = to; }
int fake_capture(void) { return capture; }
void fake_set_pending(int to) { pending = to; }
int fake_retained(int device) { return retained[device]; }
uint64_t fake_last_access_count(void) { return last_device_count; }
void *fake_foreign_context(void) { return &foreign_context; }
void *fake_current(void) { return current(); }
long fake_live(int kind) {
    long live = 0;
    for (unsigned i = 0; i < sizeof objects / sizeof *objects; i++) live += objects[i].kind == (enum kind)kind;
    return live;
}
address fake_add(int kind, uint64_t len, uint64_t exportable) {
    address base = take_addresses(len);
    if (kind == MAPPED) {
        struct object *p = add(PHYSICAL, next_number++, len);
        p->flags = exportable ? 1 : 0;
        add(MAPPED, base, len)->other = p->key;
    } else {
        add(kind, base, len);
    }
    return base;
}
uint32_t fake_flags(int kind, address key) {
    struct object *o = find(kind, key);
    return o ? o->flags : ~0u;
}
void fake_foreign_handle(unsigned char *out) {
    memset(out, 0, 64);
    memcpy(out, "ELSE", 4);
    uint64_t len = 0x400000;
    memcpy(out + 16, &len, 8);
}
void *fake_foreign_stream(void) {
    struct object *o = add(STREAM, next_number, 0);
    next_number += 16;
    o->device = 0;
    return (void *)(uintptr_t)o->key;
}

/* The driver. */

result cuInit(unsigned flags) {
    const char *text = getenv("FAKE_INIT");
    (void)flags;
    return text ? (result)atoi(text) : 0;
}
result cuDriverGetVersion(int *version) { *version = 13000; return 0; }
result cuGetErrorName(result code, const char **name) {
    switch (code) {
    case 1: *name = "CUDA_ERROR_INVALID_VALUE"; return 0;
    case 2: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
    case 34: *name = "CUDA_ERROR_STUB_LIBRARY"; return 0;
    case 100: *name = "CUDA_ERROR_NO_DEVICE"; return 0;
    case 201: *name = "CUDA_ERROR_INVALID_CONTEXT"; return 0;
    case 712: *name = "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"; return 0;
    case 803: *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return 0;
    default: *name = NULL; return 1;
    }
}
result cuDeviceGetCount(int *count) { *count = number_of_devices(); return 0; }
result cuDeviceGet(int *device, int number) {
    const char *sick = getenv("FAKE_SICK");
    if (sick && atoi(sick) == number) return 999;
    *device = number;
    return 0;
}
result cuDeviceGetName(char *name, int len, int device) {
    ENTER(SAFE);
    snprintf(name, len, "Fake %d", device);
    return 0;
}
result cuDeviceTotalMem_v2(size_t *bytes, int device) { ENTER(SAFE); (void)device; *bytes = 1ull << 34; return 0; }
#ifdef OLD
result cuDeviceGetUuid(unsigned char *uuid, int device) { ENTER(SAFE); memset(uuid, 0x10 + device, 16); return 0; }
#else
result cuDeviceGetUuid_v2(unsigned char *uuid, int device) { ENTER(SAFE); memset(uuid, 0x20 + device, 16); return 0; }
#endif
result cuDeviceGetAttribute(int *value, uint32_t attribute, int device) {
    ENTER(SAFE);
    (void)device;
#ifdef OLD
    if (attribute > 100) return 1;
#endif
    const char *mps = getenv("FAKE_MPS");
    const char *node = getenv("FAKE_NUMA_NODE");
    *value = attribute == 133 ? (mps ? atoi(mps) : 0) : attribute == 134 ? (node ? atoi(node) : -1) : 1;
    return 0;
}
result cuDeviceCanAccessPeer(int *can, int device, int peer) {
    ENTER(SAFE);
    *can = device != peer && device < 2 && peer < 2;
    return 0;
}
result cuDevicePrimaryCtxRetain(void **context, int device) {
    ENTER(0);
    retained[device]++;
    *context = &contexts[device];
    return 0;
}
result cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER(0);
    if (retained[device]-- == 0) violations++;
    return 0;
}
result cuCtxGetCurrent(void **context) { ENTER(SAFE | NEVER_FAILS); *context = current(); return 0; }
result cuCtxPushCurrent_v2(void *context) {
    ENTER(SAFE);
    if (context != (void *)&foreign_context && !retained[device_of(context)]) violations++;
    stack[depth++] = context;
    return 0;
}
result cuCtxPopCurrent_v2(void **context) {
    ENTER(SAFE | NEVER_FAILS);
    if (!depth) {
        violations++;
        return 201;
    }
    *context = stack[--depth];
    return 0;
}
result cuCtxGetDevice(int *device) { ENTER(SAFE | NEEDS_CONTEXT | NEVER_FAILS); *device = device_of(current()); return 0; }
result cuCtxEnablePeerAccess(void *context, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    static int enabled[8][8];
    int *pair = &enabled[device_of(current())][device_of(context)];
    return (*pair)++ ? 704 : 0;
}
#ifndef OLD
result cuThreadExchangeStreamCaptureMode(uint32_t *value) {
    ENTER(SAFE | NEVER_FAILS);
    uint32_t former = mode;
    mode = *value;
    *value = former;
    return 0;
}
#endif

result cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER(NEEDS_CONTEXT);
    *free = 12345;
    *total = 1ull << 34;
    return 0;
}
result cuMemAlloc_v2(address *base, size_t len) {
    ENTER(NEEDS_CONTEXT);
    *base = take_addresses(len);
    add(PLAIN, *base, len);
    return 0;
}
result cuMemFree_v2(address base) {
    ENTER(NEEDS_CONTEXT);
    return give_back(find(MANAGED, base) ? MANAGED : PLAIN, base);
}
result cuMemGetAddressRange_v2(address *base, size_t *len, address inside) {
    ENTER(NEEDS_CONTEXT);
    struct object *o = around(inside);
    if (!o) return 1;
    *base = o->key;
    *len = o->len;
    return 0;
}
result cuPointerGetAttributes(unsigned count, const uint32_t *asked, void **to, address inside) {
    ENTER(SAFE);
    struct object *o = around(inside);
    for (unsigned i = 0; i < count; i++) {
        struct object *p = o && o->kind == MAPPED ? find(PHYSICAL, o->other) : NULL;
        switch (asked[i]) {
        case 2: *(uint32_t *)to[i] = !o ? 0 : o->kind == PINNED ? 1 : 2; break;
        case 8: *(char *)to[i] = o && o->kind == MANAGED; break;
        case 9: *(int *)to[i] = o ? o->device : -2; break;
        case 10: *(char *)to[i] = o && o->kind == PLAIN; break;
        case 11: *(address *)to[i] = o ? o->key : 0; break;
        case 12: *(size_t *)to[i] = o ? o->len : 0; break;
        case 14: *(uint64_t *)to[i] = p ? p->flags : 0; break;
#ifndef OLD
        case 17: *(void **)to[i] = o && o->kind == POOL ? (void *)&objects : NULL; break;
#endif
        default: return 1;
        }
    }
    return 0;
}
result cuMemHostAlloc(void **start, size_t len, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    if (posix_memalign(start, 4096, len)) return 2;
    memset(*start, 0xee, len);
    add(HOST, (address)*start, len)->flags = flags;
    return 0;
}
result cuMemFreeHost(void *start) {
    ENTER(NEEDS_CONTEXT);
    result code = give_back(HOST, (address)start);
    if (!code) free(start);
    return code;
}
result cuMemHostRegister_v2(void *start, size_t len, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    if (find(REGISTERED, (address)start)) return 712;
    add(REGISTERED, (address)start, len)->flags = flags;
    return 0;
}
result cuMemHostUnregister(void *start) { ENTER(NEEDS_CONTEXT); return give_back(REGISTERED, (address)start); }
result cuMemHostGetDevicePointer_v2(address *device, void *start, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    (void)flags;
    *device = (address)start;
    return find(REGISTERED, (address)start) ? 0 : 1;
}

#ifndef OLD
#include "virtual_memory.h"
#include "pool.h"
#endif

struct handle { unsigned char bytes[64]; };

result cuIpcGetMemHandle(struct handle *handle, address base) {
    ENTER(0);
    struct object *o = find(PLAIN, base);
    if (!o) return 1;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->bytes, "MINE", 4);
    return 0;
}
result cuIpcOpenMemHandle_v2(address *base, struct handle handle, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    if (!memcmp(handle.bytes, "MINE", 4)) return 201;
    if (memcmp(handle.bytes, "ELSE", 4) || flags != 1) return 1;
    uint64_t len;
    memcpy(&len, handle.bytes + 16, 8);
    *base = 0x600000000000ull;
    struct object *o = find(OPENED, *base);
    if (o) o->count++;
    else add(OPENED, *base, len);
    return 0;
}
result cuIpcCloseMemHandle(address base) {
    ENTER(NEEDS_CONTEXT);
    struct object *o = find(OPENED, base);
    if (o && --o->count) return 0;
    return give_back(OPENED, base);
}
result cuIpcGetEventHandle(struct handle *handle, void *event) {
    ENTER(0);
    struct object *o = find(EVENT, (address)event);
    if (!o || o->flags != 6) return 1;
    memset(handle, 0, sizeof *handle);
    memcpy(handle->bytes, "EVENT", 5);
    return 0;
}
result cuIpcOpenEventHandle(void **event, struct handle handle) {
    ENTER(NEEDS_CONTEXT);
    if (memcmp(handle.bytes, "EVENT", 5)) return 1;
    *event = (void *)(uintptr_t)add(EVENT, next_number, 0)->key;
    next_number += 16;
    return 0;
}
result cuEventCreate(void **event, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    struct object *o = add(EVENT, next_number, 0);
    next_number += 16;
    o->flags = flags;
    *event = (void *)(uintptr_t)o->key;
    return 0;
}

/* A stream may be used in the context it belongs to; a default stream belongs to the current one. */
static result stream_ok_(const char *name, void *stream) {
    pthread_mutex_lock(&lock);
    size_t used = strlen(placed);
    snprintf(placed + used, sizeof placed - used, "%s %llu %d\n", name, (unsigned long long)(address)stream,
             current() ? device_of(current()) : -1);
    pthread_mutex_unlock(&lock);
    if (!current()) return 201;
    if ((address)stream <= 2) return 0;
    struct object *o = find(STREAM, (address)stream);
    if (!o) {
        violations++;
        return 400;
    }
    return device_of(current()) == o->device ? 0 : 400;
}

#define stream_ok(stream) stream_ok_(__func__, stream)

result cuEventRecord(void *event, void *stream) {
    ENTER(0);
    struct object *o = find(EVENT, (address)event);
    result code = stream_ok(stream);
    if (code) return code;
    return o && o->device == device_of(current()) ? 0 : 400;
}
result cuEventQuery(void *event) { ENTER(0); return !find(EVENT, (address)event) ? 400 : pending ? 600 : 0; }
result cuEventDestroy_v2(void *event) { ENTER(0); return give_back(EVENT, (address)event); }
result cuStreamCreate(void **stream, unsigned flags) {
    ENTER(NEEDS_CONTEXT);
    struct object *o = add(STREAM, next_number, 0);
    next_number += 16;
    o->flags = flags;
    *stream = (void *)(uintptr_t)o->key;
    return 0;
}
result cuStreamDestroy_v2(void *stream) { ENTER(0); return give_back(STREAM, (address)stream); }
result cuStreamQuery(void *stream) { ENTER(0); result code = stream_ok(stream); return code ? code : pending ? 600 : 0; }
result cuStreamSynchronize(void *stream) { ENTER(0); return stream_ok(stream); }
result cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    ENTER(0);
    if (!find(EVENT, (address)event) || flags) return 400;
    return stream_ok(stream);
}
result cuStreamGetCtx(void *stream, void **context) {
    ENTER(SAFE);
    struct object *o = find(STREAM, (address)stream);
    if (!o) return 400;
    *context = &contexts[o->device];
    return 0;
}
result cuStreamIsCapturing(void *stream, uint32_t *status) {
    ENTER(SAFE);
    if (capture && (address)stream <= 1) return 906;
    *status = 0;
    return 0;
}
#ifndef OLD
result cuStreamGetId(void *stream, unsigned long long *id) {
    ENTER(0);
    *id = 100 + (address)stream;
    return stream_ok(stream);
}
struct operation { uint32_t operation; address word; uint64_t value; uint32_t flags; address alias; uint64_t pad; };
result cuStreamBatchMemOp_v2(void *stream, unsigned count, struct operation *operations, unsigned flags) {
    ENTER(0);
    if (!count || count > 255 || flags) return 1;
    /* Any context will do, or none: a named stream brings its own. */
    result code = (address)stream <= 2 ? stream_ok(stream) : find(STREAM, (address)stream) ? 0 : 400;
    for (unsigned i = 0; !code && i < count; i++)
        if (operations[i].operation == 5) *(uint64_t *)operations[i].word = operations[i].value;
    return code;
}
#endif
result cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    ENTER(0);
    result code = stream_ok(stream);
    if (!code) function(data);
    return code;
}
result cuMemcpyHtoDAsync_v2(address to, const void *from, size_t len, void *stream) {
    ENTER(0);
    (void)to, (void)from, (void)len;
    return stream_ok(stream);
}
result cuMemcpyDtoHAsync_v2(void *to, address from, size_t len, void *stream) {
    ENTER(0);
    (void)to, (void)from, (void)len;
    return stream_ok(stream);
}
result cuMemcpyDtoDAsync_v2(address to, address from, size_t len, void *stream) {
    ENTER(0);
    (void)to, (void)from, (void)len;
    return stream_ok(stream);
}
result cuMemsetD8Async(address to, unsigned char byte, size_t len, void *stream) {
    ENTER(0);
    (void)to, (void)byte, (void)len;
    return stream_ok(stream);
}
#endif
