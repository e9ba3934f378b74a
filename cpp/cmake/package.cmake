# What CMake projects of others find: find_package(mlx_tvm_ffi CONFIG) and its targets.
#   mlx_tvm_ffi::stream       stream.h, for kernels: tvm-ffi's headers and nothing to link
#   mlx_tvm_ffi::mlx_tvm_ffi  op.h, for ops of MLX: links us, MLX and tvm-ffi
include(CMakePackageConfigHelpers)

set(package_dir share/cmake/mlx_tvm_ffi)
# Two sets, since the second one can only be read where MLX was found.
install(TARGETS mlx_tvm_ffi_headers mlx_tvm_ffi_stream EXPORT mlx_tvm_ffi_stream
  LIBRARY DESTINATION lib)
install(TARGETS mlx_tvm_ffi EXPORT mlx_tvm_ffi LIBRARY DESTINATION lib)
install(EXPORT mlx_tvm_ffi_stream FILE streamTargets.cmake NAMESPACE mlx_tvm_ffi::
  DESTINATION ${package_dir})
install(EXPORT mlx_tvm_ffi FILE mlx_tvm_ffiTargets.cmake NAMESPACE mlx_tvm_ffi::
  DESTINATION ${package_dir})

configure_package_config_file(
  ${CMAKE_CURRENT_LIST_DIR}/mlx_tvm_ffiConfig.cmake.in mlx_tvm_ffiConfig.cmake
  INSTALL_DESTINATION ${package_dir} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(mlx_tvm_ffiConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES
  ${CMAKE_CURRENT_BINARY_DIR}/mlx_tvm_ffiConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/mlx_tvm_ffiConfigVersion.cmake
  DESTINATION ${package_dir})
