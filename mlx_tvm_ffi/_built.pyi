# Written by CMake.
MLX_VERSION: str
VERSION: str
