"""Any tvm-ffi kernel on mlx.core.array, called directly or as a lazy op in MLX's graph."""
