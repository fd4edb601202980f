"""The latent cache's rows and pages, as numbers that a host without torch can read."""

from __future__ import annotations

PAGE_TOKENS = 64
LATENT = 512  # values of a row: the first of its dimensions
ROW = 576  # latent and position-free dimensions
