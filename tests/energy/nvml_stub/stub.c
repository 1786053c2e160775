/* A libnvidia-ml.so.1 that plays scripted power traces on a clock the test sets.
 *
 * Types and codes follow nvml.h. Each device has a power trace (piecewise constant watts), from which come an energy
 * counter that steps every `counter_period_s`, an instant power and an average over `window_s`, as real devices have.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
enum { COUNTER = 0, POWER = 1, INSTANT = 2, HANDLE = 3, INIT = 4, FUNCTIONS = 5 };
#define MAX_DEVICES 8
#define MAX_FAULTS 16

typedef struct { int function, code; double from_s, to_s; } Fault;
typedef struct {
    char uuid[96], name[96];
    int parent; /* the GPU of a MIG slice, or -1 */
    int mig_mode, supports[FUNCTIONS];
    double counter_period_s, counter_phase_s, window_s, limit_w;
    double reset_s; /* the counter begins anew here */
    double override_mj; /* the counter reads this, when not NAN */
    double override_mw;
    uint64_t total_bytes, free_bytes;
    int points;
    double *t, *w, *e; /* breakpoints, watts from there on, joules until there */
    Fault faults[MAX_FAULTS];
    int n_faults;
} Device;

static Device devices[MAX_DEVICES];
static int n_devices, initialized;
static double now_s = -1;

static double now(void) {
    if (now_s >= 0) return now_s;
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec + ts.tv_nsec * 1e-9;
}

/* Script ------------------------------------------------------------------------------------------------------- */

void stub_clear(void) { n_devices = 0; initialized = 0; now_s = -1; }
void stub_set_time(double s) { now_s = s; }

int stub_add(const char *uuid, const char *name, int parent) {
    Device *d = &devices[n_devices];
    memset(d, 0, sizeof *d);
    snprintf(d->uuid, sizeof d->uuid, "%s", uuid);
    snprintf(d->name, sizeof d->name, "%s", name);
    d->parent = parent;
    d->counter_period_s = 0.1;
    d->window_s = 1.0;
    d->limit_w = 700;
    d->reset_s = -INFINITY;
    d->override_mj = d->override_mw = NAN;
    for (int i = 0; i < FUNCTIONS; i++) d->supports[i] = parent < 0;
    return n_devices++;
}

void stub_trace(int i, int points, const double *t, const double *w) {
    Device *d = &devices[i];
    d->points = points;
    d->t = malloc(points * sizeof(double)); d->w = malloc(points * sizeof(double)); d->e = malloc(points * sizeof(double));
    memcpy(d->t, t, points * sizeof(double)); memcpy(d->w, w, points * sizeof(double));
    d->e[0] = 0;
    for (int k = 1; k < points; k++) d->e[k] = d->e[k - 1] + w[k - 1] * (t[k] - t[k - 1]);
}

void stub_support(int i, int function, int yes) { devices[i].supports[function] = yes; }
void stub_counter(int i, double period_s, double phase_s) { devices[i].counter_period_s = period_s; devices[i].counter_phase_s = phase_s; }
void stub_reset_counter(int i, double at_s) { devices[i].reset_s = at_s; }
void stub_override(int i, double mj, double mw) { devices[i].override_mj = mj; devices[i].override_mw = mw; }
void stub_mig_mode(int i, int on) { devices[i].mig_mode = on; }

void stub_memory(int i, uint64_t total_bytes, uint64_t free_bytes) { devices[i].total_bytes = total_bytes; devices[i].free_bytes = free_bytes; }

void stub_fault(int i, int function, int code, double from_s, double to_s) {
    Device *d = &devices[i];
    d->faults[d->n_faults++] = (Fault){function, code, from_s, to_s};
}

/* Physics ------------------------------------------------------------------------------------------------------ */

static int segment(const Device *d, double t) {
    int low = 0, high = d->points - 1;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (d->t[middle] <= t) low = middle; else high = middle - 1;
    }
    return low;
}
static double energy_j(const Device *d, double t) {
    if (!d->points) return 0;
    if (t <= d->t[0]) return isfinite(t) ? d->w[0] * (t - d->t[0]) : 0;
    int k = segment(d, t);
    return d->e[k] + d->w[k] * (t - d->t[k]);
}

/* NVML --------------------------------------------------------------------------------------------------------- */

static int check(const Device *d, int function) {
    if (!initialized) return UNINITIALIZED;
    for (int i = 0; i < d->n_faults; i++)
        if (d->faults[i].function == function && now() >= d->faults[i].from_s && now() < d->faults[i].to_s) return d->faults[i].code;
    if (function < HANDLE && !d->supports[function]) return NOT_SUPPORTED;
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (!n_devices && getenv("NVML_STUB_DEVICE")) {
        static const double t[] = {0}, w[] = {100};
        stub_trace(stub_add(getenv("NVML_STUB_DEVICE"), "Stub GPU", -1), 1, t, w);
    }
    for (int i = 0; i < n_devices; i++)
        for (int k = 0; k < devices[i].n_faults; k++) {
            Fault f = devices[i].faults[k];
            if (f.function == INIT && now() >= f.from_s && now() < f.to_s) return f.code;
        }
    initialized++;
    return SUCCESS;
}
int nvmlShutdown(void) { if (initialized) initialized--; return SUCCESS; }
const char *nvmlErrorString(int code) { static char text[32]; snprintf(text, sizeof text, "stub error %d", code); return text; }
int nvmlSystemGetDriverVersion(char *out, unsigned n) { snprintf(out, n, "stub"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *out) {
    *out = 0;
    for (int i = 0; i < n_devices; i++) *out += devices[i].parent < 0;
    return initialized ? SUCCESS : UNINITIALIZED;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    for (int i = 0; i < n_devices; i++)
        if (devices[i].parent < 0 && index-- == 0) { *out = &devices[i]; return check(*out, HANDLE); }
    return INVALID_ARGUMENT;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, Device **out) {
    for (int i = 0; i < n_devices; i++)
        if (!strcmp(devices[i].uuid, uuid)) { *out = &devices[i]; return check(*out, HANDLE); }
    return initialized ? NOT_FOUND : UNINITIALIZED;
}
int nvmlDeviceGetUUID(Device *d, char *out, unsigned n) { snprintf(out, n, "%s", d->uuid); return SUCCESS; }
int nvmlDeviceGetName(Device *d, char *out, unsigned n) { snprintf(out, n, "%s", d->name); return SUCCESS; }
typedef struct { uint64_t total, free, used; } Memory;
int nvmlDeviceGetMemoryInfo(Device *d, Memory *out) {
    *out = (Memory){d->total_bytes, d->free_bytes, d->total_bytes - d->free_bytes};
    return d->total_bytes ? check(d, HANDLE) : NOT_SUPPORTED;
}
int nvmlDeviceGetPowerUsage(Device *d, unsigned *mw) {
    double t = now();
    *mw = !isnan(d->override_mw) ? (unsigned)d->override_mw : (unsigned)lround(1000 * (energy_j(d, t) - energy_j(d, t - d->window_s)) / d->window_s);
    return check(d, POWER);
}
int nvmlDeviceGetEnforcedPowerLimit(Device *d, unsigned *mw) { *mw = d->limit_w * 1000; return d->limit_w > 0 ? SUCCESS : NOT_SUPPORTED; }
int nvmlDeviceGetMigMode(Device *d, unsigned *current, unsigned *pending) { *current = *pending = d->mig_mode; return SUCCESS; }
int nvmlDeviceIsMigDeviceHandle(Device *d, unsigned *yes) { *yes = d->parent >= 0; return SUCCESS; }
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Device *d, Device **out) {
    if (d->parent < 0) return INVALID_ARGUMENT;
    *out = &devices[d->parent];
    return SUCCESS;
}

#ifndef TOO_OLD
int nvmlDeviceGetTotalEnergyConsumption(Device *d, uint64_t *mj) {
    double p = d->counter_period_s, t = floor((now() - d->counter_phase_s) / p) * p + d->counter_phase_s;
    double from = t >= d->reset_s ? energy_j(d, d->reset_s) : 0;
    *mj = !isnan(d->override_mj) ? (uint64_t)d->override_mj : (uint64_t)llround(1000 * (energy_j(d, t) - from));
    return check(d, COUNTER);
}
typedef struct { uint32_t fieldId, scopeId; int64_t timestamp, latencyUsec; unsigned valueType; int nvmlReturn; union { double d; unsigned u; uint64_t ull; } value; } Field;
int nvmlDeviceGetFieldValues(Device *d, int n, Field *values) {
    if (!initialized) return UNINITIALIZED;
    for (int i = 0; i < n; i++) {
        values[i].nvmlReturn = values[i].fieldId == 186 ? check(d, INSTANT) : NOT_SUPPORTED;
        values[i].valueType = 1;
        values[i].value.u = d->points ? (unsigned)lround(1000 * d->w[segment(d, now())]) : 0;
    }
    return SUCCESS;
}
#endif
