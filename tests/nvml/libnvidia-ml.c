/* A stand-in for NVIDIA's management library, for tests without a GPU.
 *
 * It answers from the file that NVML_STAND_IN names, one answer on a line: GPU (or "-"), key, value.
 * The key is the function and its arguments, joined by dots. A value "!15" is the error 15, "!wedge"
 * a call that never returns, "!die" one that kills the process, "!signal 9" one in which the process
 * gets that signal ("!once 9": the first time only), "!slow 7" the value 7 after 3.5 s. What is not
 * in the file is not supported (3). Built with -DOLD_DRIVER it lacks what only newer drivers have.
 */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef struct { int index; } *Device;

enum { MOST = 64, LONGEST = 4096 };
static struct { int index; } devices[MOST];
static char *lines[8192];
static int line_count;

static void load(void) {
    char line[LONGEST];
    const char *path = getenv("NVML_STAND_IN");
    FILE *file = path ? fopen(path, "r") : NULL;
    line_count = 0;
    while (file && fgets(line, sizeof line, file) && line_count < 8192) {
        line[strcspn(line, "\n")] = 0;
        lines[line_count++] = strdup(line);
    }
    if (file) fclose(file);
}

/* The text behind "GPU KEY ", or an error code by `error`. */
static const char *find(int gpu, const char *key, int *error) {
    char start[256];
    if (gpu < 0) snprintf(start, sizeof start, "- %s ", key);
    else snprintf(start, sizeof start, "%d %s ", gpu, key);
    *error = 3;
    for (int i = 0; i < line_count; i++) {
        if (strncmp(lines[i], start, strlen(start))) continue;
        const char *value = lines[i] + strlen(start);
        if (!strcmp(value, "!wedge")) for (;;) pause();
        if (!strcmp(value, "!die")) abort();
        if (!strncmp(value, "!signal ", 8)) raise(atoi(value + 8));
        if (!strncmp(value, "!once ", 6)) {
            char mark[LONGEST];
            snprintf(mark, sizeof mark, "%s.once", getenv("NVML_STAND_IN"));
            int made = open(mark, O_CREAT | O_EXCL | O_WRONLY, 0600);
            if (made >= 0) raise(atoi(value + 6));
        }
        if (!strncmp(value, "!slow ", 6)) { usleep(3500000); value += 6; }
        *error = value[0] == '!' ? atoi(value + 1) : 0;
        return value;
    }
    return NULL;
}

static int text(int gpu, const char *key, char *out, uint size) {
    int error;
    const char *value = find(gpu, key, &error);
    if (!error) snprintf(out, size, "%s", value);
    return error;
}

static int numbers(int gpu, const char *key, int count, ull *out) {
    int error;
    const char *value = find(gpu, key, &error);
    char *rest = (char *)value;
    for (int i = 0; !error && i < count; i++) out[i] = strtoull(rest, &rest, 10);
    return error;
}

static int number(Device d, const char *key, uint *out) {
    ull value = 0;
    int error = numbers(d->index, key, 1, &value);
    if (!error) *out = (uint)value;
    return error;
}

static int two(Device d, const char *key, uint *one, uint *other) {
    ull values[2] = {0};
    int error = numbers(d->index, key, 2, values);
    if (!error) { *one = (uint)values[0]; *other = (uint)values[1]; }
    return error;
}

#define KEY(...) char key[128]; snprintf(key, sizeof key, __VA_ARGS__)
#define TEXT(name) int name(Device d, char *out, uint size) { return text(d->index, #name, out, size); }
#define NUMBER(name) int name(Device d, uint *out) { return number(d, #name, out); }
#define NUMBER_OF(name) \
    int name(Device d, uint of, uint *out) { KEY(#name ".%u", of); return number(d, key, out); }
#define TWO(name) int name(Device d, uint *one, uint *other) { return two(d, #name, one, other); }

int nvmlInitWithFlags(uint flags) {
    int error;
    (void)flags;
    load();
    find(-1, "nvmlInitWithFlags", &error);
    return error == 3 ? 0 : error;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { (void)code; return "an error of the stand-in"; }
int nvmlSystemGetDriverVersion(char *out, uint size) {
    return text(-1, "nvmlSystemGetDriverVersion", out, size);
}
int nvmlSystemGetNVMLVersion(char *out, uint size) {
    return text(-1, "nvmlSystemGetNVMLVersion", out, size);
}
int nvmlSystemGetCudaDriverVersion(int *out) {
    ull value = 0;
    int error = numbers(-1, "nvmlSystemGetCudaDriverVersion", 1, &value);
    *out = (int)value;
    return error;
}
int nvmlDeviceGetCount_v2(uint *out) {
    ull value = 0;
    int error = numbers(-1, "nvmlDeviceGetCount_v2", 1, &value);
    *out = (uint)value;
    return error;
}
int nvmlDeviceGetHandleByIndex_v2(uint index, Device *out) {
    int error;
    if (index >= MOST) return 2;
    find((int)index, "nvmlDeviceGetHandleByIndex_v2", &error);
    devices[index].index = (int)index;
    *out = (Device)&devices[index];
    return error == 3 ? 0 : error;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, Device *out) {
    char own[128];
    for (uint index = 0; index < MOST; index++)
        if (!text((int)index, "nvmlDeviceGetUUID", own, sizeof own) && !strcmp(own, uuid))
            return nvmlDeviceGetHandleByIndex_v2(index, out);
    return 6;
}

TEXT(nvmlDeviceGetName)
TEXT(nvmlDeviceGetUUID)
TEXT(nvmlDeviceGetVbiosVersion)
NUMBER(nvmlDeviceGetPersistenceMode)
NUMBER(nvmlDeviceGetComputeMode)
NUMBER(nvmlDeviceGetPerformanceState)
NUMBER_OF(nvmlDeviceGetTemperature)
NUMBER_OF(nvmlDeviceGetTemperatureThreshold)
NUMBER(nvmlDeviceGetPowerUsage)
NUMBER(nvmlDeviceGetPowerManagementLimit)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit)
NUMBER_OF(nvmlDeviceGetClockInfo)
NUMBER_OF(nvmlDeviceGetMaxClockInfo)
NUMBER_OF(nvmlDeviceGetApplicationsClock)
NUMBER_OF(nvmlDeviceGetDefaultApplicationsClock)
NUMBER(nvmlDeviceGetVirtualizationMode)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth)
NUMBER(nvmlDeviceGetPcieReplayCounter)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus)
TWO(nvmlDeviceGetEccMode)
TWO(nvmlDeviceGetMigMode)
TWO(nvmlDeviceGetGspFirmwareMode)

typedef struct {
    char legacy[16];
    uint domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;
int nvmlDeviceGetPciInfo_v3(Device d, Pci *out) {
    return text(d->index, "nvmlDeviceGetPciInfo_v3", out->bus_id, sizeof out->bus_id);
}

typedef struct { uint version, sensor; int degrees; } Temperature;
int nvmlDeviceGetTemperatureV(Device d, Temperature *out) {
    KEY("nvmlDeviceGetTemperatureV.%u", out->sensor);
    return number(d, key, (uint *)&out->degrees);
}
typedef struct { uint version; int degrees; } Margin;
int nvmlDeviceGetMarginTemperature(Device d, Margin *out) {
    return number(d, "nvmlDeviceGetMarginTemperature", (uint *)&out->degrees);
}

typedef struct { ull total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device d, Memory *out) {
    return numbers(d->index, "nvmlDeviceGetMemoryInfo", 3, (ull *)out);
}

int nvmlDeviceGetTotalEccErrors(Device d, uint type, uint counter, ull *out) {
    KEY("nvmlDeviceGetTotalEccErrors.%u.%u", type, counter);
    return numbers(d->index, key, 1, out);
}
int nvmlDeviceGetRemappedRows(Device d, uint *single, uint *twice, uint *pending, uint *failed) {
    ull v[4] = {0};
    int error = numbers(d->index, "nvmlDeviceGetRemappedRows", 4, v);
    *single = (uint)v[0], *twice = (uint)v[1], *pending = (uint)v[2], *failed = (uint)v[3];
    return error;
}
/* "MAX HIGH PARTIAL LOW NONE" */
int nvmlDeviceGetRowRemapperHistogram(Device d, uint *out) {
    ull v[5] = {0};
    int error = numbers(d->index, "nvmlDeviceGetRowRemapperHistogram", 5, v);
    for (int i = 0; i < 5; i++) out[i] = (uint)v[i];
    return error;
}
typedef struct { uint version; ull counts[11]; uint exceeded; } Sram;
int nvmlDeviceGetSramEccErrorStatus(Device d, Sram *out) {
    return number(d, "nvmlDeviceGetSramEccErrorStatus", &out->exceeded);
}
int nvmlDeviceGetRetiredPages(Device d, uint cause, uint *count, ull *out) {
    KEY("nvmlDeviceGetRetiredPages.%u", cause);
    ull number = 0;
    int error = numbers(d->index, key, 1, &number);
    if (error) return error;
    if (*count < number) { *count = (uint)number; return 7; }
    *count = (uint)number;
    if (out) memset(out, 0, number * sizeof *out);
    return 0;
}

int nvmlDeviceGetNvLinkState(Device d, uint link, uint *out) {
    KEY("nvmlDeviceGetNvLinkState.%u", link);
    return number(d, key, out);
}
int nvmlDeviceGetNvLinkErrorCounter(Device d, uint link, uint counter, ull *out) {
    KEY("nvmlDeviceGetNvLinkErrorCounter.%u.%u", link, counter);
    return numbers(d->index, key, 1, out);
}
int nvmlDeviceGetP2PStatus(Device d, Device other, uint of, uint *out) {
    KEY("nvmlDeviceGetP2PStatus.%d.%u", other->index, of);
    return number(d, key, out);
}
int nvmlDeviceGetTopologyCommonAncestor(Device d, Device other, uint *out) {
    KEY("nvmlDeviceGetTopologyCommonAncestor.%d", other->index);
    return number(d, key, out);
}

/* "PID BYTES PID BYTES …" */
typedef struct { uint pid; ull bytes; uint gpu_instance, compute_instance; } Process;
static int processes(Device d, uint *count, Process *out) {
    int error;
    const char *value = find(d->index, "processes", &error);
    uint number = 0, room = *count;
    for (char *rest = (char *)value; !error && *rest; number++) {
        uint pid = (uint)strtoul(rest, &rest, 10);
        ull bytes = strtoull(rest, &rest, 10);
        if (out && number < room) out[number] = (Process){pid, bytes, 0, 0};
    }
    *count = number;
    return error ? error : number > room ? 7 : 0;
}
int nvmlDeviceGetComputeRunningProcesses_v2(Device d, uint *count, Process *out) {
    return processes(d, count, out);
}

typedef struct {
    uint field, scope;
    long long at, latency;
    uint type, error;
    union { double d; uint u; ull ull; } value;
} Field;
int nvmlDeviceGetFieldValues(Device d, int count, Field *out) {
    for (int i = 0; i < count; i++) {
        KEY("nvmlDeviceGetFieldValues.%u", out[i].field);
        if (out[i].scope) {
            KEY("nvmlDeviceGetFieldValues.%u.%u", out[i].field, out[i].scope);
            out[i].error = (uint)numbers(d->index, key, 1, &out[i].value.ull);
        } else {
            out[i].error = (uint)numbers(d->index, key, 1, &out[i].value.ull);
        }
        out[i].type = 3;
    }
    return 0;
}

/* "STATE STATUS HEALTH CLIQUE UUID"; the last two may be left out; each byte of the UUID is UUID */
typedef struct { unsigned char uuid[16]; uint status, clique; uint state; } Fabric;
typedef struct { uint version; unsigned char uuid[16]; uint status, clique, state, health; } FabricV;
static int fabric(Device d, ull *out) { return numbers(d->index, "fabric", 5, out); }
int nvmlDeviceGetGpuFabricInfo(Device d, Fabric *out) {
    ull v[5] = {0};
    int error = fabric(d, v);
    out->state = (uint)v[0], out->status = (uint)v[1], out->clique = (uint)v[3];
    memset(out->uuid, (int)v[4], sizeof out->uuid);
    return error;
}

#ifndef OLD_DRIVER
int nvmlDeviceGetComputeRunningProcesses_v3(Device d, uint *count, Process *out) {
    return processes(d, count, out);
}
int nvmlDeviceGetCurrentClocksEventReasons(Device d, ull *out) {
    return numbers(d->index, "throttle", 1, out);
}
int nvmlDeviceGetGpuFabricInfoV(Device d, FabricV *out) {
    ull v[5] = {0};
    int error = fabric(d, v);
    out->state = (uint)v[0], out->status = (uint)v[1], out->health = (uint)v[2];
    out->clique = (uint)v[3];
    memset(out->uuid, (int)v[4], sizeof out->uuid);
    return error;
}
typedef struct {
    uint version;
    unsigned char guid[16];
    char chassis[16];
    unsigned char slot, tray, host, peer, module;
} Platform;
int nvmlDeviceGetPlatformInfo(Device d, Platform *out) {
    return text(d->index, "nvmlDeviceGetPlatformInfo", out->chassis, sizeof out->chassis);
}
#endif
int nvmlDeviceGetCurrentClocksThrottleReasons(Device d, ull *out) {
    return numbers(d->index, "throttle", 1, out);
}
