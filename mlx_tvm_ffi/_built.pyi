# Written by CMake.
MLX_VERSION: str
