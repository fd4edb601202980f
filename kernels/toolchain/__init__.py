"""Compiling kernels, with and without a GPU, and reading what was built."""
