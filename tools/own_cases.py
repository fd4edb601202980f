"""Predictions beside the project's own measurements, made once for the pages that show them."""

from __future__ import annotations

from functools import cache

from k3sim.calibrate.compare import shipped_kernels, shipped_links, shipped_steps

shipped_kernel_cases = cache(shipped_kernels.shipped_kernel_cases)
cublas_cases = cache(shipped_kernels.cublas_cases)
shipped_step_cases = cache(shipped_steps.shipped_step_cases)
link_kernel_cases = cache(shipped_links.link_kernel_cases)
link_step_cases = cache(shipped_links.link_step_cases)
