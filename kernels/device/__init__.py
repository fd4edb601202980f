"""Pieces of device code that several kernels share."""
