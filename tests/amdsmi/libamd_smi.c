/* A stand-in for AMD's management library, for tests without a GPU.
 *
 * It answers from the file that AMDSMI_STAND_IN names, as tests/nvml/libnvidia-ml.c does: GPU (or
 * "-"), key, value on a line. A value "!10" is the status 10, "!wedge" a call that never returns,
 * "!die" one that kills the process, "!signal 9" one in which the process gets that signal, "!slow 7"
 * the value 7 after 3.5 s. What is not in the file is not supported (2). RELEASE is the first number
 * of the library, which decides on the layout of its structures: 24 (ROCm 6.3), 25 (6.4), 26 (7).
 * Built with -DBEFORE_6_2 it lacks what came with ROCm 6.2.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef RELEASE
#define RELEASE 26
#endif
#ifndef SHORT_PROCESS
#define SHORT_PROCESS 0  /* 1: as in ROCm 6.4.0 */
#endif

typedef struct { int index; } *Gpu;
typedef unsigned long long ull;

enum { MOST = 64, LONGEST = 4096 };
static struct { int index; } gpus[MOST], sockets[MOST];
static char *lines[8192];
static int line_count, ready;

static const char *find(int gpu, const char *key, int *status) {
    char start[256];
    if (gpu < 0) snprintf(start, sizeof start, "- %s ", key);
    else snprintf(start, sizeof start, "%d %s ", gpu, key);
    *status = ready ? 2 : 32;
    for (int i = 0; ready && i < line_count; i++) {
        if (strncmp(lines[i], start, strlen(start))) continue;
        const char *value = lines[i] + strlen(start);
        if (!strcmp(value, "!wedge")) for (;;) pause();
        if (!strcmp(value, "!die")) abort();
        if (!strncmp(value, "!signal ", 8)) raise(atoi(value + 8));
        if (!strncmp(value, "!slow ", 6)) { usleep(3500000); value += 6; }
        *status = value[0] == '!' ? atoi(value + 1) : 0;
        return value;
    }
    return NULL;
}

static int text(int gpu, const char *key, char *out, size_t size) {
    int status;
    const char *value = find(gpu, key, &status);
    if (!status) snprintf(out, size, "%s", value);
    return status;
}

static int numbers(int gpu, const char *key, int count, uint64_t *out) {
    int status;
    const char *value = find(gpu, key, &status);
    char *rest = (char *)value;
    for (int i = 0; !status && i < count; i++) out[i] = strtoull(rest, &rest, 0);
    return status;
}

#define KEY(...) char key[128]; snprintf(key, sizeof key, __VA_ARGS__)

int amdsmi_init(uint64_t flags) {
    char line[LONGEST];
    int status;
    const char *path = getenv("AMDSMI_STAND_IN");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (flags != 2) return 1;
    line_count = 0;
    while (file && fgets(line, sizeof line, file) && line_count < 8192) {
        line[strcspn(line, "\n")] = 0;
        lines[line_count++] = strdup(line);
    }
    if (file) fclose(file);
    /* Without it the real one would make files in /dev/shm. */
    if (!getenv("RSMI_MUTEX_THREAD_ONLY")) return 30;
    ready = 1;
    find(-1, "amdsmi_init", &status);
    ready = status == 2 || !status;
    return ready ? 0 : status;
}
int amdsmi_shut_down(void) { return 0; }
#ifndef BEFORE_6_2
int amdsmi_clean_gpu_local_data(Gpu gpu) { (void)gpu; abort(); }
#endif

#if RELEASE < 26
typedef struct { uint32_t year, major, minor, release; const char *build; } Version;
#else
typedef struct { uint32_t major, minor, release; const char *build; } Version;
#endif
int amdsmi_get_lib_version(Version *out) {
    uint64_t wanted = RELEASE;
    memset(out, 0, sizeof *out);
    numbers(-1, "release", 1, &wanted);
#if RELEASE < 26
    out->year = (uint32_t)wanted;
    out->major = 7;
#else
    out->major = (uint32_t)wanted;
#endif
    out->build = "a build of the stand-in";
    return 0;
}

/* A socket for each GPU, as there is one in reality. */
int amdsmi_get_socket_handles(uint32_t *count, void **out) {
    uint64_t number = 0;
    int status = numbers(-1, "gpus", 1, &number);
    for (uint32_t i = 0; !status && out && i < *count && i < number; i++) {
        sockets[i].index = (int)i;
        out[i] = &sockets[i];
    }
    *count = (uint32_t)number;
    return status;
}
int amdsmi_get_processor_handles(void *socket, uint32_t *count, void **out) {
    int index = ((Gpu)socket)->index;
    if (out && *count) {
        gpus[index].index = index;
        out[0] = &gpus[index];
    }
    *count = 1;
    return 0;
}
int amdsmi_get_processor_type(Gpu gpu, int *out) { (void)gpu; *out = 1; return 0; }

int amdsmi_get_gpu_device_bdf(Gpu gpu, uint64_t *out) {
    char name[64];
    unsigned domain, bus, device, function;
    int status = text(gpu->index, "bdf", name, sizeof name);
    if (status) return status;
    sscanf(name, "%x:%x:%x.%x", &domain, &bus, &device, &function);
    *out = (uint64_t)domain << 16 | bus << 8 | device << 3 | function;
    return 0;
}
int amdsmi_get_gpu_device_uuid(Gpu gpu, unsigned *length, char *out) {
    return *length < 38 ? 1 : text(gpu->index, "uuid", out, *length);
}

typedef struct { char market_name[256]; uint32_t vendor; char rest[900]; } Asic;
int amdsmi_get_gpu_asic_info(Gpu gpu, Asic *out) {
    memset(out, 0, sizeof *out);
    out->vendor = 0x1002;
    return text(gpu->index, "name", out->market_name, sizeof out->market_name);
}
typedef struct { char version[RELEASE < 25 ? 64 : 256], date[RELEASE < 25 ? 64 : 256]; } Driver;
int amdsmi_get_gpu_driver_info(Gpu gpu, Driver *out) {
    strcpy(out->date, "2025/01/01 00:00");
    return text(gpu->index, "driver", out->version, sizeof out->version);
}
int amdsmi_get_gpu_memory_total(Gpu gpu, int kind, uint64_t *out) {
    return kind ? 2 : numbers(gpu->index, "memory_total", 1, out);
}
int amdsmi_get_gpu_memory_usage(Gpu gpu, int kind, uint64_t *out) {
    return kind ? 2 : numbers(gpu->index, "memory_used", 1, out);
}
int amdsmi_get_temp_metric(Gpu gpu, uint32_t sensor, uint32_t metric, int64_t *out) {
    KEY("temperature.%u.%u", sensor, metric);
    return numbers(gpu->index, key, 1, (uint64_t *)out);
}

/* "CORRECTABLE UNCORRECTABLE DEFERRED" */
typedef struct { uint64_t correctable, uncorrectable, deferred, reserved[5]; } Errors;
int amdsmi_get_gpu_total_ecc_count(Gpu gpu, Errors *out) {
    return numbers(gpu->index, "ecc", 3, &out->correctable);
}
int amdsmi_get_gpu_ecc_count(Gpu gpu, uint64_t block, Errors *out) {
    KEY("ecc.%#llx", (ull)block);
    return numbers(gpu->index, key, 3, &out->correctable);
}

/* A letter for each page: R, P or F, or "-" */
typedef struct { uint64_t address, size; int status; } Page;
int amdsmi_get_gpu_bad_page_info(Gpu gpu, uint32_t *count, Page *out) {
    char letters[4096];
    int status = text(gpu->index, "pages", letters, sizeof letters);
    if (status) return status;
    uint32_t number = letters[0] == '-' ? 0 : (uint32_t)strlen(letters);
    for (uint32_t i = 0; out && i < number; i++)
        out[i] = (Page){i << 12, 1 << 12, letters[i] == 'R' ? 0 : letters[i] == 'P' ? 1 : 2};
    *count = number;
    return 0;
}
#if RELEASE >= 25
int amdsmi_get_gpu_bad_page_threshold(Gpu gpu, uint32_t *out) {
    uint64_t value = 0;
    int status = numbers(gpu->index, "threshold", 1, &value);
    *out = (uint32_t)value;
    return status;
}
#endif

/* "MAX_WIDTH MAX_SPEED WIDTH SPEED" */
typedef struct {
    struct { uint16_t max_width; uint32_t max_speed, interface, slot; uint64_t reserved[10]; } fixed;
    struct { uint16_t width; uint32_t speed, bandwidth; uint64_t counts[18]; } metric;
    uint64_t reserved[32];
} Pcie;
_Static_assert(sizeof(((Pcie *)0)->fixed) == 96, "amdsmi_pcie_info_t.pcie_static");
int amdsmi_get_pcie_info(Gpu gpu, Pcie *out) {
    uint64_t v[4] = {0};
    int status = numbers(gpu->index, "pcie", 4, v);
    memset(out, 0, sizeof *out);
    out->fixed.max_width = (uint16_t)v[0], out->fixed.max_speed = (uint32_t)v[1];
    out->metric.width = (uint16_t)v[2], out->metric.speed = (uint32_t)v[3];
    return status;
}

/* "NOW DEFAULT" in microwatts */
typedef struct { uint64_t now, usual, dpm, least, most, reserved[3]; } PowerCap;
int amdsmi_get_power_cap_info(Gpu gpu, uint32_t sensor, PowerCap *out) {
    memset(out, 0, sizeof *out);
    return sensor ? 2 : numbers(gpu->index, "power_cap", 2, &out->now);
}
typedef struct { uint32_t now, least, most; uint8_t locked, sleeps; uint32_t reserved[4]; } Clock;
int amdsmi_get_clock_info(Gpu gpu, int kind, Clock *out) {
    uint64_t most = 0;
    int status = kind ? 2 : numbers(gpu->index, "clock", 1, &most);
    *out = (Clock){132, 132, (uint32_t)most, 0, 1, {0}};
    return status;
}
int amdsmi_get_gpu_perf_level(Gpu gpu, uint32_t *out) {
    uint64_t value = 0;
    int status = numbers(gpu->index, "level", 1, &value);
    *out = (uint32_t)value;
    return status;
}
int amdsmi_get_gpu_compute_partition(Gpu gpu, char *out, uint32_t size) {
    return text(gpu->index, "compute_partition", out, size);
}
int amdsmi_get_gpu_memory_partition(Gpu gpu, char *out, uint32_t size) {
    return text(gpu->index, "memory_partition", out, size);
}

/* "PROCHOT PPT SOCKET VR HBM": 1 where it is active, 255 where it is not reported */
typedef struct {
    uint64_t reference, violation, counter, accumulated[RELEASE < 25 ? 5 : 6];
    uint64_t percent[RELEASE < 25 ? 5 : 6];
    uint8_t active[RELEASE < 25 ? 5 : 6];
    uint64_t reserved[RELEASE < 26 ? 3 : 736];
} Violations;
int amdsmi_get_violation_status(Gpu gpu, Violations *out) {
    uint64_t v[5] = {0};
    int status = numbers(gpu->index, "violations", 5, v);
    memset(out, 255, sizeof *out);
    for (int i = 0; i < 5; i++) out->active[i] = (uint8_t)v[i];
    return status;
}

/* A letter for each link: U, D or X */
#if RELEASE >= 25
typedef struct { uint32_t count, states[8]; uint64_t reserved[7]; } Links;
int amdsmi_get_gpu_xgmi_link_status(Gpu gpu, Links *out) {
    char letters[64];
    int status = text(gpu->index, "links", letters, sizeof letters);
    if (status) return status;
    out->count = (uint32_t)strlen(letters);
    for (uint32_t i = 0; i < out->count; i++)
        out->states[i] = letters[i] == 'D' ? 0 : letters[i] == 'U' ? 1 : 2;
    return 0;
}
#endif
int amdsmi_topo_get_link_type(Gpu gpu, Gpu other, uint64_t *hops, uint32_t *out) {
    uint64_t value = 0;
    KEY("link_type.%d", other->index);
    int status = numbers(gpu->index, key, 1, &value);
    if (status == 2) status = numbers(gpu->index, "link_type", 1, &value);
    *hops = 1;
    *out = (uint32_t)value;
    return status;
}

/* "PID BYTES PID BYTES …", or "-" */
typedef struct {
    char name[RELEASE < 25 ? 32 : 256];
    uint32_t pid;
    uint64_t memory;
    struct { uint64_t gfx, enc; uint32_t reserved[12]; } engine_usage;
    struct { uint64_t gtt, cpu, vram; uint32_t reserved[10]; } memory_usage;
    char container[RELEASE < 25 ? 32 : 256];
    uint32_t reserved[RELEASE < 25 || SHORT_PROCESS ? 4 : 12];
} Process;
int amdsmi_get_gpu_process_list(Gpu gpu, uint32_t *room, Process *out) {
    int status;
    const char *value = find(gpu->index, "processes", &status);
    uint32_t number = 0;
    if (status) return status;
    for (char *rest = (char *)value; *rest && *rest != '-'; number++) {
        Process one;
        memset(&one, 0, sizeof one);
        strcpy(one.name, "a process of the stand-in");
        one.pid = (uint32_t)strtoul(rest, &rest, 10);
        one.memory_usage.vram = one.memory = strtoull(rest, &rest, 10);
        if (number < *room) out[number] = one;
        while (*rest == ' ') rest++;
    }
    status = number > *room ? 15 : 0;
    *room = number;
    return status;
}
