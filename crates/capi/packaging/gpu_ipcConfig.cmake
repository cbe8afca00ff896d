# find_package(gpu_ipc) and target_link_libraries(program gpu_ipc::gpu_ipc).
get_filename_component(_gpu_ipc_prefix "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)
if(NOT TARGET gpu_ipc::gpu_ipc)
  add_library(gpu_ipc::gpu_ipc SHARED IMPORTED)
  set_target_properties(gpu_ipc::gpu_ipc PROPERTIES
    IMPORTED_LOCATION "${_gpu_ipc_prefix}/lib/libgpu_ipc.so.0"
    IMPORTED_SONAME "libgpu_ipc.so.0"
    INTERFACE_INCLUDE_DIRECTORIES "${_gpu_ipc_prefix}/include")
endif()
unset(_gpu_ipc_prefix)
