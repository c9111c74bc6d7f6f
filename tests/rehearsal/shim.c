/* A PJRT plugin that answers as a TPU and computes by a CPU plugin (tests/rehearsal/README.md).
 *
 * torch_xla loads it for PJRT_DEVICE=TPU by TPU_LIBRARY_PATH. Only the functions below answer otherwise than the CPU
 * plugin's. Environment:
 *   REHEARSAL_PLUGIN       the CPU plugin
 *   REHEARSAL_DEVICES      number of devices, where TPU_VISIBLE_CHIPS does not give fewer
 *   REHEARSAL_KIND         kind of device, such as `TPU v6 lite`
 *   REHEARSAL_HBM          bytes of a device's memory; 0: no memory statistics
 *   REHEARSAL_FOLDER       gets each program with its compile options, counts of calls, and libtpu's flags
 *   REHEARSAL_TRANSLATOR   command that rewrites a program with a TPU's custom calls: COMMAND PROGRAM RESULT
 *   REHEARSAL_FAIL         `client 1`, `compile N`, `execute N`: that call fails; `gone N`: every call from execution N on
 *   REHEARSAL_FAIL_CODE, REHEARSAL_FAIL_TEXT   the error's code (PJRT_Error_Code) and message
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "pjrt_c_api.h"

#define MAX_DEVICES 256
#define MAGIC 0x72656865617273ULL

/* torch_xla 2.9.0 and the plugin are of different releases: structs differ in size behind the fields of both. */
#define WIDENED(Type, name, given)                                                                  \
  Type name;                                                                                        \
  memset(&name, 0, sizeof name);                                                                    \
  memcpy(&name, given, (given)->struct_size < sizeof name ? (given)->struct_size : sizeof name);    \
  name.struct_size = Type##_STRUCT_SIZE

typedef struct {
  unsigned long long magic;
  PJRT_Error_Code code;
  char text[4096];
} OwnError;

extern char** environ;
static const PJRT_Api* plugin;
/* Calls so far, in a file that the rehearsal reads: compiled, executed, memory statistics, read back. */
static atomic_long* counts;
enum { COMPILED, EXECUTED, MEMORY, READ_BACK, NUM_COUNTS };

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

static int is_own(const void* error) { return error && ((const OwnError*)error)->magic == MAGIC; }

static PJRT_Error* own_error(PJRT_Error_Code code, const char* text) {
  OwnError* error = calloc(1, sizeof *error);
  error->magic = MAGIC;
  error->code = code;
  snprintf(error->text, sizeof error->text, "%s", text);
  return (PJRT_Error*)error;
}

static void error_destroy(PJRT_Error_Destroy_Args* args) {
  if (is_own(args->error)) free(args->error);
  else plugin->PJRT_Error_Destroy(args);
}

static void error_message(PJRT_Error_Message_Args* args) {
  if (!is_own(args->error)) {
    plugin->PJRT_Error_Message(args);
    return;
  }
  args->message = ((const OwnError*)args->error)->text;
  args->message_size = strlen(args->message);
}

static PJRT_Error* error_code(PJRT_Error_GetCode_Args* args) {
  if (!is_own(args->error)) return plugin->PJRT_Error_GetCode(args);
  args->code = ((const OwnError*)args->error)->code;
  return NULL;
}

/* Returns the error that REHEARSAL_FAIL asks for at call `number` of a kind, or NULL. */
static PJRT_Error* asked_failure(const char* kind, long number) {
  char what[16];
  long at;
  if (sscanf(setting("REHEARSAL_FAIL", ""), "%15s %ld", what, &at) != 2) return NULL;
  int is_gone = !strcmp(what, "gone") && atomic_load(&counts[EXECUTED]) >= at;
  if (!is_gone && (strcmp(what, kind) || number != at)) return NULL;
  return own_error(atoi(setting("REHEARSAL_FAIL_CODE", "8")), setting("REHEARSAL_FAIL_TEXT", "asked for"));
}

static long number_of_devices(void) {
  long all = atol(setting("REHEARSAL_DEVICES", "1")), visible = 1;
  const char* chips = getenv("TPU_VISIBLE_CHIPS");
  if (!chips || !*chips) chips = getenv("TPU_VISIBLE_DEVICES");
  if (!chips || !*chips) return all;
  for (; *chips; chips++) visible += *chips == ',';
  return visible < all ? visible : all;
}

static void write_file(const char* path, const char* bytes, size_t size) {
  FILE* file = fopen(path, "wb");
  if (!file || fwrite(bytes, 1, size, file) != size || fclose(file)) {
    fprintf(stderr, "[rehearsal] cannot write %s\n", path);
    abort();
  }
}

static PJRT_Error* client_create(PJRT_Client_Create_Args* args) {
  PJRT_Error* failure = asked_failure("client", 1);
  if (failure) return failure;
  WIDENED(PJRT_Client_Create_Args, own, args);
  PJRT_NamedValue count = {.struct_size = PJRT_NamedValue_STRUCT_SIZE, .name = "cpu_device_count", .name_size = 16};
  count.type = PJRT_NamedValue_kInt64;
  count.int64_value = number_of_devices();
  count.value_size = 1;
  own.create_options = &count;
  own.num_options = 1;
  char path[900];
  const char* flags = setting("LIBTPU_INIT_ARGS", "");
  snprintf(path, sizeof path, "%s/%d.flags", setting("REHEARSAL_FOLDER", "/tmp"), getpid());
  write_file(path, flags, strlen(flags));
  PJRT_Error* error = plugin->PJRT_Client_Create(&own);
  args->client = own.client;
  return error;
}

static PJRT_Error* platform_name(PJRT_Client_PlatformName_Args* args) {
  args->platform_name = "tpu";
  args->platform_name_size = 3;
  return NULL;
}

static PJRT_Error* platform_version(PJRT_Client_PlatformVersion_Args* args) {
  args->platform_version = "rehearsal on a CPU";
  args->platform_version_size = strlen(args->platform_version);
  return NULL;
}

static PJRT_Error* device_kind(PJRT_DeviceDescription_Kind_Args* args) {
  args->device_kind = setting("REHEARSAL_KIND", "TPU v6 lite");
  args->device_kind_size = strlen(args->device_kind);
  return NULL;
}

static PJRT_Error* device_attributes(PJRT_DeviceDescription_Attributes_Args* args) {
  static int64_t coords[MAX_DEVICES][3];
  static PJRT_NamedValue values[MAX_DEVICES][3];
  PJRT_DeviceDescription_Id_Args id = {.struct_size = PJRT_DeviceDescription_Id_Args_STRUCT_SIZE};
  id.device_description = args->device_description;
  PJRT_Error* error = plugin->PJRT_DeviceDescription_Id(&id);
  if (error) return error;
  int device = id.id % MAX_DEVICES;
  PJRT_NamedValue* of = values[device];
  coords[device][0] = device % 2; /* a v5e-8 or v6e-8 is two chips wide */
  coords[device][1] = device / 2;
  memset(of, 0, sizeof values[device]);
  for (int i = 0; i < 3; i++) of[i].struct_size = PJRT_NamedValue_STRUCT_SIZE, of[i].value_size = 1;
  of[0].name = "coords", of[0].name_size = 6, of[0].type = PJRT_NamedValue_kInt64List;
  of[0].int64_array_value = coords[device], of[0].value_size = 3;
  of[1].name = "core_on_chip", of[1].name_size = 12, of[1].type = PJRT_NamedValue_kInt64;
  of[2].name = "num_cores", of[2].name_size = 9, of[2].type = PJRT_NamedValue_kInt64, of[2].int64_value = 1;
  args->attributes = of;
  args->num_attributes = 3;
  return NULL;
}

static PJRT_Error* memory_stats(PJRT_Device_MemoryStats_Args* args) {
  long long limit = atoll(setting("REHEARSAL_HBM", "0"));
  atomic_fetch_add(&counts[MEMORY], 1);
  if (!limit) return own_error(PJRT_Error_Code_UNIMPLEMENTED, "MemoryStats is not implemented for this device");
  size_t size = args->struct_size;
  PJRT_Device* device = args->device;
  memset(args, 0, size < sizeof *args ? size : sizeof *args);
  args->struct_size = size, args->device = device;
  args->bytes_in_use = limit / 4;
  args->peak_bytes_in_use = limit / 2, args->peak_bytes_in_use_is_set = 1;
  args->bytes_limit = limit, args->bytes_limit_is_set = 1;
  return NULL;
}

static PJRT_Error* execute(PJRT_LoadedExecutable_Execute_Args* args) {
  PJRT_Error* failure = asked_failure("execute", atomic_fetch_add(&counts[EXECUTED], 1) + 1);
  if (failure) return failure;
  WIDENED(PJRT_ExecuteOptions, options, args->options);
  WIDENED(PJRT_LoadedExecutable_Execute_Args, own, args);
  own.options = &options;
  return plugin->PJRT_LoadedExecutable_Execute(&own);
}

static PJRT_Error* to_host(PJRT_Buffer_ToHostBuffer_Args* args) {
  atomic_fetch_add(&counts[READ_BACK], 1);
  PJRT_Error* failure = asked_failure("transfer", 0);
  return failure ? failure : plugin->PJRT_Buffer_ToHostBuffer(args);
}

static char* read_file(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  if (!file) return NULL;
  fseek(file, 0, SEEK_END);
  *size = ftell(file);
  rewind(file);
  char* bytes = malloc(*size + 1);
  if (fread(bytes, 1, *size, file) != *size) abort();
  fclose(file);
  return bytes;
}

static int needs_translation(const PJRT_Program* program) {
  static const char* const targets[] = {"tpu_custom_call", "AllocateBuffer", "annotate_device_placement"};
  for (int i = 0; i < 3; i++)
    if (memmem(program->code, program->code_size, targets[i], strlen(targets[i]))) return 1;
  return 0;
}

static PJRT_Error* compile(PJRT_Client_Compile_Args* args) {
  long number = atomic_fetch_add(&counts[COMPILED], 1) + 1;
  PJRT_Error* failure = asked_failure("compile", number);
  if (failure) return failure;
  const char* folder = setting("REHEARSAL_FOLDER", "/tmp");
  char program[900], options[900], result[910];
  snprintf(program, sizeof program, "%s/%d_%04ld.hlo.pb", folder, getpid(), number);
  snprintf(options, sizeof options, "%s/%d_%04ld.options.pb", folder, getpid(), number);
  write_file(program, args->program->code, args->program->code_size);
  write_file(options, args->compile_options, args->compile_options_size);
  if (!needs_translation(args->program)) return plugin->PJRT_Client_Compile(args);
  snprintf(result, sizeof result, "%s.cpu", program);
  char* const command[] = {"/bin/sh", "-c", (char*)setting("REHEARSAL_TRANSLATOR", "false"), "sh", program, result, NULL};
  pid_t child;
  int status = -1;
  if (posix_spawn(&child, command[0], NULL, NULL, command, environ) || waitpid(child, &status, 0) < 0 || status)
    return own_error(PJRT_Error_Code_INTERNAL, "[rehearsal] the translator failed");
  size_t size = 0;
  PJRT_Program own = *args->program;
  own.code = read_file(result, &size);
  own.code_size = size;
  if (!own.code) return own_error(PJRT_Error_Code_INTERNAL, "[rehearsal] the translator wrote nothing");
  WIDENED(PJRT_Client_Compile_Args, of_cpu, args);
  of_cpu.program = &own;
  PJRT_Error* error = plugin->PJRT_Client_Compile(&of_cpu);
  args->executable = of_cpu.executable;
  free(own.code);
  return error;
}

static PJRT_Error* deserialize(PJRT_Executable_DeserializeAndLoad_Args* args) {
  WIDENED(PJRT_Executable_DeserializeAndLoad_Args, own, args);
  PJRT_Error* error = plugin->PJRT_Executable_DeserializeAndLoad(&own);
  args->loaded_executable = own.loaded_executable;
  return error;
}

static void map_counts(void) {
  char path[900];
  snprintf(path, sizeof path, "%s/%d.counts", setting("REHEARSAL_FOLDER", "/tmp"), getpid());
  int file = open(path, O_RDWR | O_CREAT | O_TRUNC, 0644);
  size_t size = NUM_COUNTS * sizeof *counts;
  if (file < 0 || ftruncate(file, size)) abort();
  counts = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (counts == MAP_FAILED) abort();
  close(file);
}

const PJRT_Api* GetPjrtApi(void) {
  static PJRT_Api* own;
  if (own) return own;
  void* library = dlopen(setting("REHEARSAL_PLUGIN", ""), RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    fprintf(stderr, "[rehearsal] %s\n", dlerror());
    return NULL;
  }
  const PJRT_Api* (*get)(void) = (const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi");
  plugin = get();
  own = calloc(1, plugin->struct_size > sizeof *own ? plugin->struct_size : sizeof *own);
  memcpy(own, plugin, plugin->struct_size);
  own->PJRT_Error_Destroy = error_destroy;
  own->PJRT_Error_Message = error_message;
  own->PJRT_Error_GetCode = error_code;
  own->PJRT_Client_Create = client_create;
  own->PJRT_Client_PlatformName = platform_name;
  own->PJRT_Client_PlatformVersion = platform_version;
  own->PJRT_DeviceDescription_Kind = device_kind;
  own->PJRT_DeviceDescription_Attributes = device_attributes;
  own->PJRT_Device_MemoryStats = memory_stats;
  own->PJRT_LoadedExecutable_Execute = execute;
  own->PJRT_Buffer_ToHostBuffer = to_host;
  own->PJRT_Client_Compile = compile;
  own->PJRT_Executable_DeserializeAndLoad = deserialize;
  map_counts();
  return own;
}
