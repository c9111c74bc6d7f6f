/* Compile a program that a run sent to its client by the TPU's own compiler, for the name of a topology.
 *
 *   compiler LIBTPU TOPOLOGY IS_ONE_CHIP PROGRAM OPTIONS RESULT
 *
 * PROGRAM and OPTIONS are as shim.c writes them: the run's HLO and its serialised CompileOptionsProto. RESULT gets the
 * optimised program, a serialised HloProto; standard output the bytes of memory of a chip as JSON. Flags of libtpu are
 * read from LIBTPU_INIT_ARGS. Exit code 1, and the compiler's message on standard error, where it refuses.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "pjrt_c_api.h"

#define ARGUMENTS(Type, name) \
  Type name;                  \
  memset(&name, 0, sizeof name); \
  name.struct_size = Type##_STRUCT_SIZE

static const PJRT_Api* api;

/* The library's own exit handlers wait for devices that are not there. */
static void leave(int code) {
  fflush(stdout);
  fflush(stderr);
  _exit(code);
}

static void require(PJRT_Error* error, const char* what) {
  if (!error) return;
  ARGUMENTS(PJRT_Error_Message_Args, message);
  message.error = error;
  api->PJRT_Error_Message(&message);
  fprintf(stderr, "%s: %.*s\n", what, (int)message.message_size, message.message);
  leave(1);
}

static char* contents(const char* path, size_t* size) {
  FILE* file = fopen(path, "rb");
  if (!file) {
    perror(path);
    leave(1);
  }
  fseek(file, 0, SEEK_END);
  *size = ftell(file);
  rewind(file);
  char* bytes = malloc(*size + 1);
  if (fread(bytes, 1, *size, file) != *size) leave(1);
  fclose(file);
  return bytes;
}

int main(int count, char** words) {
  if (count != 7) return 2;
  void* library = dlopen(words[1], RTLD_NOW);
  if (!library) {
    fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  api = ((const PJRT_Api* (*)(void))dlsym(library, "GetPjrtApi"))();
  ARGUMENTS(PJRT_Plugin_Initialize_Args, start);
  require(api->PJRT_Plugin_Initialize(&start), "initialise");

  int64_t bounds[3] = {1, 1, 1};
  ARGUMENTS(PJRT_NamedValue, one_chip);
  one_chip.name = "chips_per_host_bounds";
  one_chip.name_size = strlen(one_chip.name);
  one_chip.type = PJRT_NamedValue_kInt64List;
  one_chip.int64_array_value = bounds;
  one_chip.value_size = 3;
  ARGUMENTS(PJRT_TopologyDescription_Create_Args, topology);
  topology.topology_name = words[2];
  topology.topology_name_size = strlen(words[2]);
  topology.create_options = &one_chip;
  topology.num_options = atoi(words[3]);
  require(api->PJRT_TopologyDescription_Create(&topology), "topology");

  ARGUMENTS(PJRT_Program, program);
  program.code = contents(words[4], &program.code_size);
  program.format = "hlo";
  program.format_size = 3;
  ARGUMENTS(PJRT_Compile_Args, compile);
  compile.topology = topology.topology;
  compile.program = &program;
  compile.compile_options = contents(words[5], &compile.compile_options_size);
  require(api->PJRT_Compile(&compile), "compile");

  ARGUMENTS(PJRT_Executable_GetCompiledMemoryStats_Args, memory);
  memory.executable = compile.executable;
  require(api->PJRT_Executable_GetCompiledMemoryStats(&memory), "memory");
  printf("{\"arguments\": %ld, \"outputs\": %ld, \"aliased\": %ld, \"temporaries\": %ld, \"code\": %ld}\n",
         (long)memory.argument_size_in_bytes, (long)memory.output_size_in_bytes, (long)memory.alias_size_in_bytes,
         (long)memory.temp_size_in_bytes, (long)memory.generated_code_size_in_bytes);

  ARGUMENTS(PJRT_Program, optimized);
  ARGUMENTS(PJRT_Executable_OptimizedProgram_Args, ask);
  ask.executable = compile.executable;
  ask.program = &optimized;
  require(api->PJRT_Executable_OptimizedProgram(&ask), "size of the optimised program"); /* the first call asks for it */
  optimized.code = malloc(optimized.code_size);
  require(api->PJRT_Executable_OptimizedProgram(&ask), "optimised program");
  FILE* file = fopen(words[6], "wb");
  if (!file || fwrite(optimized.code, 1, optimized.code_size, file) != optimized.code_size || fclose(file)) {
    perror(words[6]);
    leave(1);
  }
  leave(0);
}
