// Stands in for libnvidia-ml.so.1: GPUs in whatever state FAKE_NVML says, such as "healthy,lost",
// or now the file that FAKE_NVML_FILE names.
// Numbers of functions, fields and errors are NVIDIA's (nvml.h); it is asked by nvidia-ml-py itself.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <unistd.h>
#include <vector>

namespace {
enum { kOk = 0, kInvalid = 2, kNotSupported = 3, kNotFound = 6, kInsufficientSize = 7, kTimeout = 10, kLost = 15 };

std::vector<std::string> states() {
  const char *text = getenv("FAKE_NVML");
  std::vector<std::string> found;
  if (text == nullptr || *text == 0) return found;
  std::string all = text;
  if (const char *file = getenv("FAKE_NVML_FILE")) std::getline(std::ifstream(file), all);
  for (size_t from = 0; from <= all.size();) {
    size_t to = std::min(all.find(',', from), all.size());
    found.push_back(all.substr(from, to - from));
    from = to + 1;
  }
  return found;
}

bool is(uintptr_t gpu, const char *state) {
  auto all = states();
  return gpu <= all.size() && all[gpu - 1] == state;
}

struct FieldValue {  // nvmlFieldValue_t
  uint32_t field, scope;
  int64_t timestamp, latency;
  uint32_t type, result;
  uint64_t value;
};
struct PciInfo {  // nvmlPciInfo_t
  char legacy[16];
  uint32_t domain, bus, device, id, subsystem;
  char name[32];
};
struct ProcessInfo {  // nvmlProcessInfo_v2_t
  uint32_t pid;
  uint64_t memory;
  uint32_t instance, compute;
};
struct FabricInfo {  // nvmlGpuFabricInfo_t
  uint8_t uuid[16];
  uint32_t status, clique;
  uint8_t state;
};
}  // namespace

#define ALIVE(gpu) if (is(gpu, "lost")) return kLost

extern "C" {
int nvmlInitWithFlags(unsigned) { return getenv("FAKE_NVML_ERROR") ? atoi(getenv("FAKE_NVML_ERROR")) : kOk; }
int nvmlShutdown() { return kOk; }
const char *nvmlErrorString(int code) { return code == kLost ? "GPU is lost" : code == 9 ? "Driver Not Loaded" : "Other"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = states().size(); return kOk; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, uintptr_t *gpu) { *gpu = index + 1; return kOk; }
int nvmlDeviceGetHandleByUUID(const char *uuid, uintptr_t *gpu) {
  *gpu = strncmp(uuid, "GPU-0000-", 9) ? 0 : atoi(uuid + 9);
  return *gpu >= 1 && *gpu <= states().size() ? kOk : kNotFound;
}
int nvmlEventSetCreate(uintptr_t *events) { *events = 1; return kOk; }
int nvmlDeviceRegisterEvents(uintptr_t, unsigned long long, uintptr_t) { return kOk; }
int nvmlEventSetWait_v2(uintptr_t, void *, unsigned milliseconds) { usleep(1000 * milliseconds); return kTimeout; }
int nvmlDeviceGetName(uintptr_t gpu, char *name, unsigned n) { ALIVE(gpu); snprintf(name, n, "NVIDIA H100 80GB HBM3"); return kOk; }
int nvmlDeviceGetUUID(uintptr_t gpu, char *name, unsigned n) { ALIVE(gpu); snprintf(name, n, "GPU-0000-%lu", (unsigned long)gpu); return kOk; }
int nvmlDeviceGetPciInfo_v3(uintptr_t gpu, PciInfo *info) {
  ALIVE(gpu);
  memset(info, 0, sizeof *info);
  info->bus = 0xc0 + gpu;
  return kOk;
}
int nvmlDeviceGetFieldValues(uintptr_t gpu, int count, FieldValue *values) {
  ALIVE(gpu);
  for (int n = 0; n < count; n++) {
    FieldValue &value = values[n];
    value.type = 3;  // unsigned long long
    value.value = 0;
    value.result = kOk;
    if (value.field == 4) value.value = is(gpu, "ecc") ? 2 : 0;
    else if (value.field == 31) value.result = kNotSupported;
    else if (value.field == 52 || value.field == 59) value.value = is(gpu, "replays") ? 21 : 0;
    else if (value.field == 230) {
      value.type = 1;  // unsigned int: the rest of the union is not the value
      value.value = 0xdeadbeef00000000ull | (is(gpu, "reset") ? 1 : is(gpu, "reboot") ? 2 : 0);
      if (is(gpu, "old")) value.result = kNotSupported;
    } else value.result = kNotSupported;
  }
  return kOk;
}
int nvmlDeviceGetRemappedRows(uintptr_t gpu, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
  ALIVE(gpu);
  if (is(gpu, "old")) return kNotSupported;
  *correctable = 0;
  *uncorrectable = is(gpu, "remapped") || is(gpu, "remap") || is(gpu, "unremappable");
  *pending = is(gpu, "remap");
  *failed = is(gpu, "unremappable");
  return kOk;
}
int nvmlDeviceGetNvLinkState(uintptr_t gpu, unsigned link, unsigned *state) {
  ALIVE(gpu);
  if (link >= 18) return kInvalid;
  *state = !is(gpu, "pcie-card") && !(is(gpu, "nvlink") && link == 7);
  return kOk;
}
int nvmlDeviceGetCurrPcieLinkWidth(uintptr_t gpu, unsigned *width) { ALIVE(gpu); *width = is(gpu, "narrow") ? 8 : 16; return kOk; }
int nvmlDeviceGetMaxPcieLinkWidth(uintptr_t gpu, unsigned *width) { ALIVE(gpu); *width = 16; return kOk; }
int nvmlDeviceGetCurrentClocksEventReasons(uintptr_t gpu, unsigned long long *mask) {
  ALIVE(gpu);
  *mask = is(gpu, "hot") ? 0x48 : is(gpu, "warm") ? 0x20 : is(gpu, "capped") ? 0x4 : 0x1;
  return kOk;
}
int nvmlDeviceGetGpuFabricInfo(uintptr_t gpu, FabricInfo *info) {
  ALIVE(gpu);
  memset(info, 0, sizeof *info);
  info->state = is(gpu, "fabric") ? 2 : 3;
  return kOk;
}
int nvmlDeviceGetComputeRunningProcesses_v3(uintptr_t gpu, unsigned *count, ProcessInfo *found) {
  ALIVE(gpu);
  if (!is(gpu, "busy")) return *count = 0, kOk;
  unsigned room = *count;
  *count = 1;
  if (found == nullptr || room < 1) return kInsufficientSize;
  found[0] = {(uint32_t)atoi(getenv("FAKE_NVML_PID")), 40ull << 30, ~0u, ~0u};
  return kOk;
}
int nvmlDeviceGetTemperature(uintptr_t gpu, unsigned, unsigned *degrees) { ALIVE(gpu); *degrees = is(gpu, "hot") ? 92 : 41; return kOk; }
int nvmlDeviceGetPowerUsage(uintptr_t gpu, unsigned *milliwatts) { ALIVE(gpu); *milliwatts = 81234; return kOk; }
}
