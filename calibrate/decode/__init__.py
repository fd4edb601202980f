"""Decode steps of one rank, measured on a GPU."""
