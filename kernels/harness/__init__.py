"""Checking kernels against references, and timing them."""
