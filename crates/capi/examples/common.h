// What the examples share: the end of a program whose call failed, vendors by name, descriptors as text.

#ifndef EXAMPLES_COMMON_H
#define EXAMPLES_COMMON_H

#include <gpu_ipc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Ends the program with what the last call says.
static inline void check(int32_t code, const char *what)
{
    if (code != GPU_IPC_OK) {
        fprintf(stderr, "%s: %s (%s)\n", what, gpu_ipc_last_error_text(), gpu_ipc_error_name(code));
        exit(1);
    }
}

static inline void require(bool holds, const char *what)
{
    if (!holds) {
        fprintf(stderr, "%s\n", what);
        exit(1);
    }
}

static inline uint32_t vendor(const char *name)
{
    if (strcmp(name, "cuda") == 0) {
        return GPU_IPC_CUDA;
    }
    if (strcmp(name, "hip") == 0) {
        return GPU_IPC_HIP;
    }
    require(strcmp(name, "host") == 0, "a vendor is host, cuda or hip");
    return GPU_IPC_HOST;
}

#endif
