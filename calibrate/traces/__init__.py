"""Traces of profilers, read into one form: kernels, steps, waits, and two traces beside each other."""
