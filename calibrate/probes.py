"""Hardware primitives of one GPU, measured with small CUDA kernels: ``python calibrate/probes.py OUT.json``.

Needs torch and numpy alone (torch brings ``cuda.bindings``, which compiles and launches), so that the file can
be carried to a machine on which nothing else is installed. Each case is taken twice, one complete run after the
other; the difference of their medians is the noise floor. Inside a block times are ``clock64`` of its SM; across
SMs they are ``%globaltimer``, since the clocks of different GPCs drift.

The file is written anew after each case, with a checksum, and a run goes on from what it holds. ``samples.py`` reads
it and ``fit.py`` says which machine value each case gives.

The card is measured as it is found: no clock, power or mode setting is touched.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = r"""
typedef unsigned long long u64;
typedef unsigned int u32;
#define DEV __device__ __forceinline__
#define KERNEL extern "C" __global__ void

DEV u64 clk() { u64 t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory"); return t; }
DEV u64 gtime() { u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory"); return t; }
DEV u32 smid() { u32 s; asm volatile("mov.u32 %0, %%smid;" : "=r"(s)); return s; }
// Wait until a value is there. No data reaches the values compared with: all are below 2^31.
DEV void depend(u32 v) {
  asm volatile("{ .reg .pred p; setp.eq.u32 p, %0, 0xfedcba98; @p trap; }" :: "r"(v) : "memory");
}
DEV void depend64(u64 v) {
  asm volatile("{ .reg .pred p; setp.eq.u64 p, %0, 1; @p trap; }" :: "l"(v) : "memory");
}
DEV uint4 load4(const uint4* p) {  // from L2, not from L1
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV u32 load(const u32* p) {
  u32 v; asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEV u32 fold(uint4 v) { return v.x ^ v.y ^ v.z ^ v.w; }
DEV void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEV void pdl_trigger() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DEV u32 load_acquire(u32* p) {
  u32 v; asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEV void store_release(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}

// ---- streams --------------------------------------------------------------------------------------------

// One thread keeps `stages` bulk copies of `chunk` bytes under way; nobody reads what arrives.
DEV void stream(const char* src, u64 span, u64 total, u32 chunk, u32 stages, u32 block, u32 blocks) {
  extern __shared__ __align__(128) char ring[];
  __shared__ u64 bars[8];
  u32 ring_at = (u32)__cvta_generic_to_shared(ring), bar_at = (u32)__cvta_generic_to_shared(bars);
  for (u32 s = 0; s < stages; ++s)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar_at + 8 * s) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  u64 mine = (total / chunk + blocks - 1 - block) / blocks;
  u64 at = (u64)block * chunk, stride = (u64)blocks * chunk;
  u32 s = 0, parity = 0;
  for (u64 i = 0; i < mine + stages; ++i) {
    if (i >= stages) {
      u32 done = 0;
      while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar_at + 8 * s), "r"(parity) : "memory");
    }
    if (i < mine) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar_at + 8 * s), "r"(chunk)
                   : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   :: "r"(ring_at + s * chunk), "l"(src + at), "r"(chunk), "r"(bar_at + 8 * s) : "memory");
      at += stride;
      if (at >= span) at -= span;
    }
    if (++s == stages) { s = 0; if (i >= stages) parity ^= 1; }
  }
}

KERNEL stream_bulk(const char* src, u64 span, u64 total, int chunk, int stages, u64* stamps) {
  if (threadIdx.x) return;
  u64 begin = gtime();
  stream(src, span, total, chunk, stages, blockIdx.x, gridDim.x);
  stamps[2 * blockIdx.x] = begin;
  stamps[2 * blockIdx.x + 1] = gtime();
}

template <int U, bool EVICT_FIRST> DEV void stream_loads(const uint4* src, u64 count, u64* stamps) {
  u64 begin = gtime(), batch = (u64)blockDim.x * U, policy = 0;
  u32 acc = 0;
  if (EVICT_FIRST) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  for (u64 i = blockIdx.x * batch + threadIdx.x; i + batch <= count + threadIdx.x; i += gridDim.x * batch) {
    uint4 v[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint4* p = src + i + u * blockDim.x;
      if (EVICT_FIRST)
        asm volatile("ld.global.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(v[u].x), "=r"(v[u].y),
                     "=r"(v[u].z), "=r"(v[u].w) : "l"(p), "l"(policy) : "memory");
      else v[u] = load4(p);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) acc ^= fold(v[u]);
  }
  depend(acc);
  __syncthreads();
  if (threadIdx.x == 0) { stamps[2 * blockIdx.x] = begin; stamps[2 * blockIdx.x + 1] = gtime(); }
}
#define LOADS(U) KERNEL stream_loads_##U(const uint4* s, u64 n, u64* t) { stream_loads<U, false>(s, n, t); }
LOADS(1) LOADS(2) LOADS(4) LOADS(8)
KERNEL stream_evict_first(const uint4* s, u64 n, u64* t) { stream_loads<4, true>(s, n, t); }

// ---- latencies ------------------------------------------------------------------------------------------

KERNEL write_chain(const u32* next, u32* base, int lines) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < lines) base[(u64)i * 32] = next[i];
}

// A pointer chase by the block on SM `sm`; first with a clock reading around each load, then without.
KERNEL chase(const u32* base, u32* state, u32* lat, int steps, int passes, int sm, u64 warm) {
  __shared__ u32 samples[4096];
  if (smid() != sm) return;
  u32 acc = 0;
  for (int r = 0; r < 2; ++r)
    for (u64 i = threadIdx.x; i < warm; i += blockDim.x) acc ^= fold(load4((const uint4*)base + i));
  depend(acc);
  __syncthreads();
  if (threadIdx.x) return;
  u32 start = state[0], line = start;
  for (int p = 0; p < passes; ++p) {
    line = start;
    for (int i = 0; i < steps; ++i) {
      u64 a = clk();
      line = load(base + (u64)line * 32);
      depend(line);
      samples[i] = (u32)(clk() - a);
    }
    for (int i = 0; i < steps; ++i) lat[p * steps + i] = samples[i];
  }
  u64 a = clk();
  for (int i = 0; i < steps; ++i) line = load(base + (u64)line * 32);
  depend(line);
  lat[passes * steps] = (u32)(clk() - a);
  state[0] = line;
}

// Blocks 0 and 1 measure while the others stream (total = 0: nobody does). mode 0: block 0 loads a line that
// is not in L2 and then the same line again. mode 1: blocks 0 and 1 hand over 16 bytes through a flag in turn.
KERNEL loaded(const char* src, u64 span, u64 total, int chunk, int stages, const u32* probe, u32 lines,
              u32* lat, int steps, u32* flags, u64* stamps, int mode) {
  if (threadIdx.x) return;
  __shared__ u32 samples[1024];
  u64 begin = gtime();
  if (blockIdx.x > 1) {
    if (total) stream(src, span, total, chunk, stages, blockIdx.x - 2, gridDim.x - 2);
  } else {
    while (gtime() - begin < 15000);
    u32 r = (u32)begin, *mine = flags + 64 * blockIdx.x, *other = flags + 64 * (1 - blockIdx.x);
    if (mode == 0 && blockIdx.x == 0) {
      for (int i = 0; i < steps; ++i) {
        r = r * 1664525u + 1013904223u;
        const u32* p = probe + (u64)((r >> 8) % lines) * 32;
        u64 a = clk();
        u32 v = load(p);
        depend(v);
        u64 b = clk();
        depend(load(p + (v >> 31)));
        samples[2 * i] = (u32)(b - a);
        samples[2 * i + 1] = (u32)(clk() - b);
      }
      for (int i = 0; i < 2 * steps; ++i) lat[i] = samples[i];
    } else if (mode == 1) {
      uint4 data = make_uint4(0, 0, 0, 0);
      for (int i = 1; i <= steps; ++i) {
        u64 a = clk();
        if (blockIdx.x == 0) { *(uint4*)(mine + 32) = data; store_release(mine, i); }
        while (load_acquire(other) != i);
        data = load4((const uint4*)(other + 32));
        depend(data.x);
        data.x = (data.x + 1) & 0xffff;
        if (blockIdx.x == 1) { *(uint4*)(mine + 32) = data; store_release(mine, i); }
        else samples[i - 1] = (u32)(clk() - a);
      }
      if (blockIdx.x == 0) for (int i = 0; i < steps; ++i) lat[i] = samples[i];
    }
  }
  stamps[2 * blockIdx.x] = begin;
  stamps[2 * blockIdx.x + 1] = gtime();
}

// ---- L2 -------------------------------------------------------------------------------------------------

// All blocks walk the tiles of a region `iters` times. Tiles change hands from one round to the next unless
// their number is a multiple of the grid.
template <int U> DEV void l2_read(const uint4* src, int tiles, int iters, u64* stamps) {
  u64 begin = gtime();
  u32 acc = 0, tile = blockIdx.x % tiles;
  for (u64 g = blockIdx.x; g < (u64)tiles * iters; g += gridDim.x) {
    const uint4* p = src + (u64)tile * blockDim.x * U + threadIdx.x;
    uint4 v[U];
#pragma unroll
    for (int u = 0; u < U; ++u) v[u] = load4(p + u * blockDim.x);
#pragma unroll
    for (int u = 0; u < U; ++u) acc ^= fold(v[u]);
    tile += gridDim.x;
    while (tile >= tiles) tile -= tiles;
  }
  depend(acc);
  __syncthreads();
  if (threadIdx.x == 0) { stamps[2 * blockIdx.x] = begin; stamps[2 * blockIdx.x + 1] = gtime(); }
}
KERNEL l2_read_4(const uint4* s, int tiles, int iters, u64* t) { l2_read<4>(s, tiles, iters, t); }
KERNEL l2_read_8(const uint4* s, int tiles, int iters, u64* t) { l2_read<8>(s, tiles, iters, t); }

KERNEL sample(const u32* region, int lines, u32* lat, int steps, u32 seed) {
  u32 r = seed ^ (blockIdx.x * 2654435761u);
  for (int i = 0; i < steps; ++i) {
    r = r * 1664525u + 1013904223u;
    const u32* p = region + (u64)((r >> 8) % lines) * 32;
    u64 a = clk();
    depend(load(p));
    lat[blockIdx.x * steps + i] = (u32)(clk() - a);
  }
}

// ---- graph boundaries -----------------------------------------------------------------------------------

KERNEL clock_edges(u64* out, int edges) {  // per block: SM, then (globaltimer, clock64) at its steps
  u64* mine = out + (u64)blockIdx.x * (2 * edges + 1);
  mine[0] = smid();
  for (int i = 0; i < edges; ++i) {
    u64 now, c = clk();
    while (clk() - c < 4000);  // apart, so that the steps also give the rate of the clock
    u64 before = gtime();
    do { c = clk(); now = gtime(); } while (now == before);
    mine[1 + 2 * i] = now;
    mine[2 + 2 * i] = c;
  }
}
KERNEL empty() {}
KERNEL empty_pdl() { pdl_wait(); pdl_trigger(); }
KERNEL write_rows(uint4* out) { out[blockIdx.x * blockDim.x + threadIdx.x] = make_uint4(1, 2, 3, 4); }

KERNEL node(u64* stamps, const uint4* in, uint4* out, int spin, int wait) {
  u64 t0 = clk(), t1 = t0;
  if (wait) { pdl_wait(); t1 = clk(); pdl_trigger(); }
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  uint4 v = load4(in + i);
  depend(v.x);
  u64 t2 = clk();
  while (clk() - t2 < spin);
  if (out) out[i] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 *s = stamps + 16 * blockIdx.x, t3 = clk();
    s[0] = t0; s[1] = t1; s[2] = t2; s[3] = t3; s[4] = gtime();
  }
}

// ---- synchronisation ------------------------------------------------------------------------------------

DEV u32 block_reduce(u32 v, u32* part) {
  u32 lane = threadIdx.x & 31, warps = blockDim.x >> 5;
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  if (lane == 0) part[threadIdx.x >> 5] = v;
  __syncthreads();
  v = lane < warps ? part[lane] : 0;
#pragma unroll
  for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(~0u, v, o);
  __syncthreads();
  return v;
}
KERNEL reduce_loop(u32* out, u64* stamps, int iters) {
  __shared__ u32 part[32];
  u32 v = threadIdx.x;
  u64 a = clk();
#pragma unroll 1
  for (int i = 0; i < iters; ++i) v = block_reduce(v, part);
  u64 b = clk();
  if (v == 12345) *out = v;
  if (threadIdx.x == 0) stamps[blockIdx.x] = b - a;
}
DEV void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
KERNEL cluster_loop(u64* stamps, int iters, int exchange) {
  __shared__ u32 box[2];
  u32 rank, v = 1, remote, mine = (u32)__cvta_generic_to_shared(box);
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(mine), "r"((rank + 1) % 8));
  if (threadIdx.x == 0) box[0] = box[1] = 0;
  cluster_barrier();
  u64 a = clk();
#pragma unroll 1
  for (int i = 0; i < iters; ++i) {
    if (exchange && threadIdx.x == 0)
      asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(remote + 4 * (i & 1)), "r"(v) : "memory");
    cluster_barrier();
    if (exchange) { v += *(volatile u32*)(box + (i & 1)); v &= 0xffff; }
  }
  depend(v);
  u64 b = clk();
  if (threadIdx.x == 0) stamps[blockIdx.x] = b - a;
}
KERNEL grid_loop(u32* counter, u64* stamps, int iters) {
  u64 a = clk();
#pragma unroll 1
  for (int i = 1; i <= iters; ++i) {
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(counter) : "memory");
      while (load_acquire(counter) < gridDim.x * i);
    }
    __syncthreads();
  }
  u64 b = clk();
  if (threadIdx.x == 0) stamps[blockIdx.x] = b - a;
}
KERNEL fence_loop(u32* out, u64* stamps, int iters, int scope) {
  u64 a = clk();
#pragma unroll 1
  for (int i = 0; i < iters; ++i) {
    *(volatile u32*)(out + threadIdx.x) = i;
    if (scope == 1) __threadfence();
    if (scope == 2) __threadfence_system();
  }
  u64 b = clk();
  if (threadIdx.x == 0) stamps[blockIdx.x] = b - a;
}

// ---- a large kernel and a tiny one by turns -------------------------------------------------------------
// Copies differ in ID only, so that each has code of its own. The large kernel also executes 10 KB of straight
// code once, as kernels of a real step do: twenty copies are more than the instruction caches of an SM hold.

template <int ID>
DEV void large(const uint4* w, int batches, const uint4* x, u32* out, u64* stamps, int trigger) {
  __shared__ u32 part[32];
  u64 t0 = clk();
  depend64((u64)w);
  u64 t1 = clk();
  if (trigger) pdl_trigger();
  uint4 first = load4(x + threadIdx.x);
  depend(first.x);
  u64 t2 = clk();
  u32 acc = fold(first);
#pragma unroll 1
  for (int b = 0; b < batches; ++b) {
    const uint4* p = w + ((u64)b * gridDim.x + blockIdx.x) * (512 * 8) + threadIdx.x;
    uint4 v[8];
#pragma unroll
    for (int u = 0; u < 8; ++u) v[u] = load4(p + 512 * u);
#pragma unroll
    for (int u = 0; u < 8; ++u) acc ^= fold(v[u]);
  }
  depend(acc);
  u64 t3 = clk();
#pragma unroll
  for (int k = 0; k < 320; ++k) acc = (acc ^ (ID * 7919 + k * k + 1)) * (2 * k + 3);
  acc = block_reduce(acc, part);
  u32 row = blockIdx.x * 28 + threadIdx.x;
  if (threadIdx.x < 28 && row < 3584) {
    out[row] = (acc + threadIdx.x) & 0x7fffffff;
    out[row + 3584] = acc & 0x7fffffff;
  }
  if (threadIdx.x == 0) {
    u64 *s = stamps + 16 * blockIdx.x, t4 = clk(), g = gtime();
    s[0] = t0; s[1] = t1; s[2] = t2; s[3] = t3; s[4] = t4; s[5] = g;
  }
}

// Each block loads 14 KB (with 512 threads; 4 KB with 128), then from addresses that depend on it as much again,
// reduces, and stores its share of 14 KB. A rehearsal runs the same code on other data before the wait, so that its
// instructions are there when the wait ends.
template <int ID>
DEV void tiny(const uint4* in, uint4* out, const uint4* other, uint4* scrap, int share, u64* stamps, int wait,
              int rehearse) {
  __shared__ u32 part[32];
  u64 t0 = clk();
  depend64((u64)in);
  u64 t1 = clk(), t2 = t1, t3, t4, t5, t6, t7, t8;
  if (wait) pdl_trigger();
#pragma unroll 1
  for (int pass = rehearse ? 0 : 1; pass < 2; ++pass) {
    const uint4* src = pass ? in : other;
    uint4* dst = pass ? out : scrap;
    if (pass && wait) pdl_wait();
    t2 = clk();
    // All four words of each load are used, or the compiler narrows it or loads the others later.
    uint4 v = load4(src + threadIdx.x), w = make_uint4(0, 0, 0, 0);
    if (threadIdx.x + 512 < 896) w = load4(src + threadIdx.x + 512);
    u32 a = fold(v);
    depend(a);
    t3 = clk();
    u32 b = fold(w);
    depend(b);
    __syncthreads();
    t4 = clk();
    uint4 x = load4(src + 896 + threadIdx.x + (a >> 31) + (b >> 31));
    u32 c = fold(x);
    depend(c);
    t5 = clk();
    __syncthreads();
    t6 = clk();
    u32 sum = block_reduce((a >> 16) + (b >> 16) + (c >> 16) + ID, part);
    depend(sum);
    t7 = clk();
    for (u32 i = threadIdx.x; i < share; i += blockDim.x)
      dst[blockIdx.x * share + i] = make_uint4(sum, a, b, c);
    t8 = clk();
  }
  u64 g = gtime();
  if (threadIdx.x == 0) {
    u64* s = stamps + 16 * blockIdx.x;
    s[0] = t0; s[1] = t1; s[2] = t2; s[3] = t3; s[4] = t4; s[5] = t5; s[6] = t6; s[7] = t7; s[8] = t8; s[9] = g;
  }
}
#define LARGE(ID) \
  extern "C" __global__ void __launch_bounds__(512) large_##ID(const uint4* w, int batches, const uint4* x, \
      u32* out, u64* stamps, int trigger) { large<ID>(w, batches, x, out, stamps, trigger); }
#define TINY(ID) \
  extern "C" __global__ void __launch_bounds__(512) tiny_##ID(const uint4* in, uint4* out, \
      const uint4* other, uint4* scrap, int share, u64* stamps, int wait, int rehearse) { \
    tiny<ID>(in, out, other, scrap, share, stamps, wait, rehearse); }
#define TEN(M, T) M(T##0) M(T##1) M(T##2) M(T##3) M(T##4) M(T##5) M(T##6) M(T##7) M(T##8) M(T##9)
LARGE(0) LARGE(1) LARGE(2) LARGE(3) LARGE(4) LARGE(5) LARGE(6) LARGE(7) LARGE(8) LARGE(9)
TEN(LARGE, 1)
TINY(0) TINY(1) TINY(2) TINY(3) TINY(4) TINY(5) TINY(6) TINY(7) TINY(8) TINY(9)
TEN(TINY, 1) TEN(TINY, 2) TINY(30) TINY(31)
"""

BLOCK_BYTES = 200 * 1024  # of shared memory: no second block of a kernel fits on the SM
Args = Sequence[Any]


class Gpu:
    """The probes compiled for the present GPU, and what runs them: one stream, launches, graphs."""

    def __init__(self) -> None:
        import torch  # type: ignore[import-not-found, unused-ignore]
        from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

        self.torch, self.driver = torch, driver
        properties = torch.cuda.get_device_properties(0)
        self.num_sms: int = properties.multi_processor_count
        self.name: str = properties.name
        self.l2_bytes: int = properties.L2_cache_size
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        torch.zeros(1, device="cuda")  # makes the context
        cubin = compile_probes(properties.major, properties.minor)
        self._module = self.call(driver.cuModuleLoadData(cubin))
        self._functions: dict[str, Any] = {}
        # Values below 2^31, which `depend` relies on; random, since zeros can read faster.
        self.data = torch.randint(0, 2**31 - 1, (2**29,), dtype=torch.int32, device="cuda")

    def call(self, result: tuple[Any, ...]) -> Any:
        """The value of a driver call, or an exception for its error."""
        assert result[0] == self.driver.CUresult.CUDA_SUCCESS, result[0]
        return result[1] if len(result) > 1 else None

    def zeros(self, count: int, dtype: str = "int64") -> Any:
        return self.torch.zeros(count, dtype=getattr(self.torch, dtype), device="cuda")

    def launch(
        self,
        name: str,
        grid: int,
        block: int,
        args: Args,
        *,
        smem: int = 0,
        pdl: bool = False,
        cluster: int = 0,
        stream: Any = None,
    ) -> None:
        """Launch a probe. Tensors are passed as pointers, ctypes values as they are, other numbers as int."""
        driver = self.driver
        if name not in self._functions:
            function = self.call(driver.cuModuleGetFunction(self._module, name.encode()))
            self.call(
                driver.cuFuncSetAttribute(
                    function,
                    driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    BLOCK_BYTES,
                )
            )
            self._functions[name] = function
        attributes = []
        if pdl:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if cluster:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = (
                cluster,
                1,
                1,
            )
            attributes.append(attribute)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = smem
        config.hStream = (stream or self.stream).cuda_stream
        config.attrs = attributes
        config.numAttrs = len(attributes)
        values: list[Any] = []
        types: list[Any] = []
        for arg in args:
            if hasattr(arg, "data_ptr"):
                values.append(arg.data_ptr())
                types.append(ctypes.c_void_p)
            elif isinstance(arg, ctypes.c_uint64):
                values.append(arg.value)
                types.append(ctypes.c_uint64)
            else:
                values.append(int(arg))
                types.append(ctypes.c_int32)
        self.call(
            driver.cuLaunchKernelEx(
                config, self._functions[name], (tuple(values), tuple(types)) if values else 0, 0
            )
        )

    def graph(self, body: Callable[[], None]) -> Any:
        """The launches that ``body`` makes, as an executable graph."""
        driver = self.driver
        handle = self.stream.cuda_stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.call(driver.cuStreamBeginCapture(handle, mode))
        body()
        graph = self.call(driver.cuStreamEndCapture(handle))
        return self.call(driver.cuGraphInstantiate(graph, 0))

    def replay(self, graph: Any) -> None:
        self.call(self.driver.cuGraphLaunch(graph, self.stream.cuda_stream))

    def event_us(self, graph: Any, count: int) -> list[float]:
        """Time between events around each of ``count`` replays."""
        pairs = [[self.torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begin, end in pairs:
            begin.record(self.stream)
            self.replay(graph)
            end.record(self.stream)
        self.stream.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairs]


def compile_probes(major: int, minor: int, source: str = SOURCE) -> bytes:
    """Machine code of the probes (or of another ``source``) for one compute capability."""
    from cuda.bindings import nvrtc  # type: ignore[import-not-found, unused-ignore]

    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"probes.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, error
    options = [f"--gpu-architecture=sm_{major}{minor}a".encode(), b"--std=c++17"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * nvrtc.nvrtcGetProgramLogSize(program)[1]
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(log.decode())
    cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return bytes(cubin)


SCHEMA_VERSION = 2
MOST_KEPT = 2000  # of more values (single loads, not repetitions) the percentiles 0 to 100 are kept


def checksum(document: Mapping[str, Any]) -> str:
    """Over a sample file's head and rows; spacing and the checksum itself do not count."""
    rows = document.get("cases", document.get("timings"))
    if not isinstance(rows, list):
        rows = []  # whoever reads the file says what is wrong with it
    head = {name: value for name, value in document.items() if name not in ("checksum", "cases", "timings")}
    return _checksum(head, [_digest(row) for row in rows])


def _checksum(head: Mapping[str, Any], digests: Sequence[str]) -> str:
    return "sha256:" + _digest([_digest(head), *digests])


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class CannotResume(ValueError):
    """The file is of another GPU or program, or is no file of probes."""


class Recorder:
    """Takes each case twice and keeps every repetition and a summary of both; writes after every case.

    Cases that ``path`` holds already are not taken again. Raises CannotResume where its head differs from this run's.
    """

    def __init__(self, gpu: Gpu, path: Path, quick: bool, on_case: Callable[[str], None] | None = None) -> None:
        self.path, self.gpu, self.quick = path, gpu, quick
        self.replays = 20 if quick else 200
        self.started = time.monotonic()
        self.on_case = on_case or _print_line
        self.head = metadata(gpu, quick)
        self.rows: list[str] = []
        self.digests: list[str] = []
        self.done: set[str] = set()
        for case in cases_of(path, self.head):
            self._keep(case)

    def record(
        self, probe: str, parameters: dict[str, Any], sampler: Callable[[], dict[str, tuple[str, Any]]]
    ) -> None:
        """``sampler`` gives {quantity: (unit, readings)}, and is called twice."""
        if _name(probe, parameters) in self.done:
            return
        before_hz = Clocks(self.gpu).hz
        runs = [sampler(), sampler()]
        clock_hz = [round(before_hz), round(Clocks(self.gpu).hz)]
        readings = {
            quantity: {"unit": unit, **summary([run[quantity][1] for run in runs])}
            for quantity, (unit, _) in runs[0].items()
        }
        self._keep({"probe": probe, "parameters": parameters, "sm_clock_hz": clock_hz, "readings": readings})
        shown = " ".join(f"{name}={value}" for name, value in parameters.items())
        self.on_case(f"{time.monotonic() - self.started:6.1f} {probe} {shown}")
        self.write()

    def _keep(self, case: dict[str, Any]) -> None:
        self.done.add(_name(case["probe"], case["parameters"]))
        self.rows.append(json.dumps(case, separators=(",", ":")))
        self.digests.append(_digest(case))

    def write(self) -> None:
        """The whole file or none: a run that is killed leaves the file of the case before."""
        head = json.dumps({**self.head, "checksum": _checksum(self.head, self.digests)}, indent=1)[:-2]
        rows = ",\n  ".join(self.rows)
        partial = self.path.with_name(f".{self.path.name}.partial")
        partial.write_text(f'{head},\n "cases": [\n  {rows}\n ]\n}}\n', encoding="utf-8")
        partial.replace(self.path)


def summary(runs: Sequence[Any]) -> dict[str, Any]:
    """Rows of median, p10, p90, count, and the values of each run, five digits each."""
    import numpy

    rows: list[list[float]] = []
    kept: list[list[float]] = []
    for run in runs:
        values = numpy.asarray(run, dtype=float).ravel()
        row = [float(f"{v:.5g}") for v in numpy.percentile(values, (50, 10, 90))]
        rows.append([*row, int(values.size)])
        if values.size > MOST_KEPT:
            values = numpy.percentile(values, range(101))
        kept.append([float(f"{v:.5g}") for v in values])
    return {"runs": rows, "samples": kept}


def cases_of(path: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cases of an earlier run with the same head, none where there is no file; raises CannotResume otherwise."""
    if not path.exists():
        return []
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        was = {name: document[name] for name in ("schema_version", "gpu", "quick", "torch")}
        cases: list[dict[str, Any]] = document["cases"]
        whole = document["checksum"] == checksum(document)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CannotResume(f"cannot go on from {path}: it is no file of probes; accepted is one, or none") from error
    if not whole:
        raise CannotResume(f"cannot go on from {path}: its content does not match its checksum")
    for name, value in was.items():
        if value != head[name]:
            raise CannotResume(f"cannot go on from {path}: its {name} is {value!r}, this run's is {head[name]!r}")
    return cases


def _name(probe: str, parameters: Mapping[str, Any]) -> str:
    return json.dumps([probe, parameters], sort_keys=True)


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def metadata(gpu: Gpu, quick: bool) -> dict[str, Any]:
    fields = "driver_version,clocks.max.sm,clocks.max.mem,clocks.sm,clocks.mem,power.limit"
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return {
        "schema_version": SCHEMA_VERSION,
        "gpu": gpu.name,
        "num_sms": gpu.num_sms,
        "l2_bytes": gpu.l2_bytes,
        "torch": gpu.torch.__version__,
        "cuda": gpu.torch.version.cuda,
        "driver_and_clocks": {
            k: v.strip() for k, v in zip(fields.split(","), done.stdout.split(","), strict=False)
        },
        "date": time.strftime("%Y-%m"),
        "source": "k3sim calibrate/probes.py",
        "quick": quick,
        "columns_of_runs": ["median", "p10", "p90", "count"],
        "method": (
            "Graph replays or launches; each case twice, one complete run after the other (two entries under runs)."
            " Percentiles are over replays (each the mean of its graph's nodes), or over single loads where those"
            " are timed. Cycles are clock64 of one SM; us across SMs come from %globaltimer. Samples are every"
            " repetition, or the percentiles 0 to 100 of more than 2,000 single loads."
        ),
    }


# -- streams -----------------------------------------------------------------------------------------------


def span_rate(gpu: Gpu, graph: Any, stamps: Any, blocks: int, num_bytes: float, count: int) -> list[float]:
    """Bytes per second of each replay, from the first block's start to the last block's end."""
    rates = []
    for _ in range(count):
        gpu.replay(graph)
        gpu.stream.synchronize()
        times = stamps[: 2 * blocks].cpu().numpy().reshape(-1, 2)
        rates.append(1e9 * num_bytes / float(times[:, 1].max() - times[:, 0].min()))
    return rates


def hbm_streams(gpu: Gpu, recorder: Recorder) -> None:
    """HBM read rate against bytes in flight and number of SMs, by bulk copies and by plain loads.

    Isolates: nothing is computed and no byte is read twice, so a rate is of HBM or of what is in flight; time runs from
    the first block's start to the last block's end. Could mislead: start and end of the stream are inside (0.5 % of a
    1 ms stream); eight copies of 1 to 2 KiB are bound by their issue and not by bytes in flight; 96 SMs stream more
    slowly than 64, since blocks are then unequal between GPCs; no write is among the traffic.
    """
    sms, stamps = gpu.num_sms, gpu.zeros(4096)
    span = 2**31

    def bulk(kib: float, stages: int, blocks: int, probe: str) -> None:
        chunk = int(kib * 1024) // stages
        window = span // (chunk * blocks) * chunk * blocks
        expected = min(4.2e12, blocks * kib * 1024 / 0.7e-6, blocks * 60e9)
        total = int(min(window, max(expected * 1e-3, 4e8))) // chunk * chunk
        args = (gpu.data, ctypes.c_uint64(window), ctypes.c_uint64(total), chunk, stages, stamps)
        graph = gpu.graph(lambda: gpu.launch("stream_bulk", blocks, 32, args, smem=BLOCK_BYTES))
        recorder.record(
            probe,
            {"bytes_in_flight_per_sm": chunk * stages, "stages": stages, "blocks": blocks},
            lambda: {"read_rate": ("B/s", span_rate(gpu, graph, stamps, blocks, total, recorder.replays))},
        )

    for kib in (0.5, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192):
        bulk(kib, 4, sms, "hbm_bulk_in_flight")
    for kib in (8, 16, 32, 64, 128):
        bulk(kib, 8, sms, "hbm_bulk_in_flight")
        bulk(kib, 2, sms, "hbm_bulk_in_flight")
    for blocks in (1, 2, 4, 8, 16, 32, 48, 64, 96):
        bulk(128, 8, blocks, "hbm_bulk_by_sms")

    def loads(threads: int, unroll: int, blocks: int, probe: str, num_bytes: int) -> None:
        count = num_bytes // 16 // (threads * unroll) * threads * unroll
        args = (gpu.data, ctypes.c_uint64(count), stamps)
        graph = gpu.graph(lambda: gpu.launch(f"stream_loads_{unroll}", blocks, threads, args))
        per_sm = 16 * threads * unroll * max(1, blocks // sms)
        recorder.record(
            probe,
            {"bytes_in_flight_per_sm": per_sm, "threads": threads, "loads": unroll, "blocks": blocks},
            lambda: {
                "read_rate": ("B/s", span_rate(gpu, graph, stamps, blocks, count * 16, recorder.replays))
            },
        )

    for threads, unroll in ((128, 1), (256, 1), (512, 1), (512, 2), (512, 4)):
        loads(threads, unroll, sms, "hbm_loads_in_flight", 2**29)
    loads(512, 8, sms, "hbm_loads_in_flight", 2**31)
    loads(1024, 4, 2 * sms, "hbm_loads_in_flight", 2**31)
    for blocks in (1, 4, 16, 32, 64):
        loads(1024, 4, blocks, "hbm_loads_by_sms", 2**29)


# -- latencies ---------------------------------------------------------------------------------------------


def cycle(gpu: Gpu, lines: int) -> Any:
    """A random permutation of ``lines`` that is one cycle: next[i]."""
    torch = gpu.torch
    order = torch.randperm(lines, device="cuda")
    following = torch.empty(lines, dtype=torch.int32, device="cuda")
    following[order] = order.roll(-1).to(torch.int32)
    return following


def latencies(gpu: Gpu, recorder: Recorder) -> None:
    """Pointer chases of one thread in L2 and in HBM, idle and beside a stream; hand-over of a value through a flag.

    Isolates: each load's address comes from the load before, so nothing overlaps; a mean over the chain holds no clock
    reading, single loads (stamped, about 20 cycles more) give the two groups of near and far lines. Could mislead: a
    mean over near and far is neither; lines that others wrote are read more slowly the first time; regions above a few
    hundred MiB add page-table walks; beside a stream the queue decides, so a value belongs to its bytes in flight; one
    thread's load ends with its own line, where a block waits for the slowest of its lines.
    """
    import numpy

    torch, sms = gpu.torch, gpu.num_sms
    arena = torch.randint(0, 2**31 - 1, (2**28,), dtype=torch.int32, device="cuda")  # 1 GiB
    state, lat, stamps = gpu.zeros(4, "int32"), gpu.zeros(1 << 16, "int32"), gpu.zeros(4096)

    def chase(steps: int, passes: int, sm: int, warm: int) -> None:
        args = (arena, state, lat, steps, passes, sm, ctypes.c_uint64(warm))
        gpu.launch("chase", sms, 256, args, smem=BLOCK_BYTES - 20_000)

    # Lines written by all SMs just before, then read twice by one SM. Which of them are far depends on the place.
    lines, steps = 2**15, 2048
    following = cycle(gpu, lines)
    for sm in (0, 1, sms // 2, sms - 1):

        def written(sm: int = sm) -> dict[str, tuple[str, Any]]:
            first, second, plain = [], [], []
            for _ in range(recorder.replays // 4):
                gpu.launch("write_chain", sms, 256, (following, arena, lines))
                chase(steps, 2, sm, 0)
                readings = lat[: 2 * steps + 1].cpu().numpy()
                first.append(readings[:steps])
                second.append(readings[steps:-1])
                plain.append(readings[-1] / steps)
            return {
                "first_read_after_write": ("cycle", first),
                "first_read_near_decile": ("cycle", [numpy.percentile(f, 10) for f in first]),
                "first_read_far_decile": ("cycle", [numpy.percentile(f, 90) for f in first]),
                "first_read_mean": ("cycle", [f.mean() for f in first]),
                "first_read_share_above_400": ("1", [(f > 400).mean() for f in first]),
                "second_read": ("cycle", second),
                "mean_without_stamps": ("cycle", plain),
            }

        recorder.record("l2_chase_written", {"lines": lines, "sm": sm}, written)
    for mib in (1, 4, 8, 16, 24, 32, 40, 48, 56):
        lines = mib * 8192
        arena[: lines * 32 : 32] = cycle(gpu, lines)
        state.zero_()
        # Lines that were written in part are read slowly the first time: write them back.
        gpu.launch("stream_loads_4", sms, 512, (gpu.data, ctypes.c_uint64(2**28 // 16), stamps))

        def resident(lines: int = lines) -> dict[str, tuple[str, Any]]:
            single, plain = [], []
            for _ in range(max(4, recorder.replays // 10)):
                chase(2048, 1, 0, lines * 8)
                readings = lat[:2049].cpu().numpy()
                single.append(readings[:-1])
                plain.append(readings[-1] / 2048)
            return {"load": ("cycle", single), "mean_without_stamps": ("cycle", plain)}

        recorder.record("l2_chase_resident", {"region_mib": mib}, resident)
    for mib in (128, 1024):
        lines = mib * 8192
        arena[: lines * 32 : 32] = cycle(gpu, lines)
        state.zero_()

        def cold() -> dict[str, tuple[str, Any]]:
            single, plain = [], []
            for _ in range(max(4, recorder.replays // 10)):
                gpu.launch("stream_loads_4", sms, 512, (gpu.data, ctypes.c_uint64(2**28 // 16), stamps))
                chase(2048, 1, 0, 0)
                readings = lat[:2049].cpu().numpy()
                single.append(readings[:-1])
                plain.append(readings[-1] / 2048)
            return {"load": ("cycle", single), "mean_without_stamps": ("cycle", plain)}

        recorder.record("hbm_chase", {"region_mib": mib}, cold)

    # While the other SMs stream with so much in flight each, and while they do nothing.
    flags, blocks = gpu.zeros(256, "int32"), sms

    def beside(mode: int, in_flight: int) -> None:
        steps, stages = (60, 4) if mode else (150, 4)
        chunk = in_flight // stages or 4096
        window = 2**31 // (chunk * (blocks - 2)) * chunk * (blocks - 2)
        streamed = window if in_flight else 0
        args = (
            gpu.data,
            ctypes.c_uint64(window),
            ctypes.c_uint64(streamed),
            chunk,
            stages,
            arena,
            2**19,
            lat,
        )

        def sampler() -> dict[str, tuple[str, Any]]:
            first, second, turns, rates, inside = [], [], [], [], []
            for _ in range(recorder.replays // 3):
                flags.zero_()
                gpu.launch("loaded", blocks, 32, (*args, steps, flags, stamps, mode), smem=BLOCK_BYTES)
                readings = lat[: 2 * steps].cpu().numpy()
                times = stamps[: 2 * blocks].cpu().numpy().reshape(-1, 2)
                first.append(readings[0::2])
                second.append(readings[1::2])
                turns.append(readings[:steps] / 2)
                rates.append(1e9 * streamed / float(times[2:, 1].max() - times[2:, 0].min() + 1))
                inside.append(float(times[0, 1] < times[2:, 1].max()))
            found: dict[str, tuple[str, Any]] = (
                {"one_handoff": ("cycle", turns)}
                if mode
                else {
                    "not_in_l2": ("cycle", first),
                    "in_l2": ("cycle", second),
                    "mean_in_l2": ("cycle", [row.mean() for row in second]),
                }
            )
            if streamed:
                found |= {"stream_rate": ("B/s", rates), "ended_inside_stream": ("1", inside)}
            return found

        name = "handoff_beside_stream" if mode else "loads_beside_stream"
        recorder.record(name, {"stream_bytes_in_flight_per_sm": in_flight, "region_mib": 64}, sampler)

    for kib in (0, 8, 16, 24, 32, 48, 64, 128):
        beside(0, kib * 1024)
    for kib in (0, 16, 32, 64, 128):
        beside(1, kib * 1024)


# -- L2 ----------------------------------------------------------------------------------------------------


def l2(gpu: Gpu, recorder: Recorder) -> None:
    """L2 read rate to all SMs and to one, and what is left of a region after other traffic.

    Isolates: regions are read before they are timed, so their bytes come from L2; survival looks at single loads, which
    either hit or miss. Could mislead: an SM that returns to its own part needs no second copy in the other half of
    L2, so its rate holds to larger regions than that of data all SMs read (``tiles_change_sm``); 8.7 MB whose parts
    change SM run above every larger region, not explained; hit and miss are told apart at 515 cycles, a gap of few.
    """
    sms, stamps, lat = gpu.num_sms, gpu.zeros(4096), gpu.zeros(1 << 14, "int32")
    tile = {4: 65536, 8: 131072}

    def rate(unroll: int, tiles: int, blocks: int, probe: str, threads: int = 1024) -> None:
        name, num_bytes = f"l2_read_{unroll}", tiles * tile[unroll] * threads // 1024
        iters = max(4, int(200e-6 * (5e12 if blocks > 1 else 8e10) / num_bytes))

        def body() -> None:
            gpu.launch(name, blocks, threads, (gpu.data, tiles, 3, stamps))
            gpu.launch(name, blocks, threads, (gpu.data, tiles, iters, stamps))

        graph = gpu.graph(body)
        recorder.record(
            probe,
            {
                "region_bytes": num_bytes,
                "loads": unroll,
                "threads": threads,
                "blocks": blocks,
                "tiles_change_sm": bool(tiles % blocks),
            },
            lambda: {
                "read_rate": (
                    "B/s",
                    span_rate(gpu, graph, stamps, blocks, num_bytes * iters, recorder.replays),
                )
            },
        )

    for k in (1, 2, 3, 4, 5, 6):
        rate(4, k * sms, sms, "l2_read")
    for mib in (8, 16, 24, 30, 36, 40, 44, 48, 56, 64, 80):
        rate(4, mib * 16 + 5, sms, "l2_read")
    for mib in (16, 30, 40, 48):
        rate(4, mib * 16 + 5, 2 * sms, "l2_read")
    for mib in (1, 8):
        for unroll, threads in ((4, 256), (4, 512), (4, 1024), (8, 1024)):
            rate(unroll, (mib << 20) // (unroll * threads * 16), 1, "l2_read_one_sm", threads)

    steps = 24

    def survival(name: str, region_mib: int, streamed_mib: int, reads: int) -> None:
        def sampler() -> dict[str, tuple[str, Any]]:
            kept, hits = [], []
            for trial in range(3 if recorder.quick else 10):
                # Clean start, then the region, then other traffic, from places not read for long.
                at = (64 + (trial * 131 + streamed_mib * 7) % 1500) << 18
                sweep = ctypes.c_uint64((160 << 20) // 16)
                gpu.launch("stream_loads_4", sms, 512, (gpu.data[at : at + 1], sweep, stamps))
                gpu.launch("l2_read_4", sms, 1024, (gpu.data, region_mib * 16, reads, stamps))
                if streamed_mib:
                    other = at + (170 << 18)
                    count = ctypes.c_uint64((streamed_mib << 20) // 16)
                    gpu.launch(name, sms, 512, (gpu.data[other : other + 1], count, stamps))
                gpu.launch("sample", sms, 1, (gpu.data, region_mib * 8192, lat, steps, 977 * trial + 13))
                readings = lat[: sms * steps].cpu().numpy()
                kept.append(float((readings < 515).mean()))  # L2 far ends near 500, HBM begins near 530
                hits.append(readings)
            return {"kept": ("1", kept), "load": ("cycle", hits)}

        parameters = {
            "region_mib": region_mib,
            "region_reads": reads,
            "streamed_mib": streamed_mib,
            "evict_first": name == "stream_evict_first",
        }
        recorder.record("l2_survival", parameters, sampler)

    for region_mib in (8, 16, 32, 40):
        for streamed_mib in (0, 8, 16, 24, 28, 32, 36, 40, 48, 60):
            survival("stream_loads_4", region_mib, streamed_mib, 2)
    for streamed_mib in (0, 16, 24, 32, 40, 48, 60):
        survival("stream_loads_4", 16, streamed_mib, 1)
    for region_mib, streamed_mib in ((16, 0), (16, 40), (16, 120), (32, 40), (32, 120)):
        survival("stream_evict_first", region_mib, streamed_mib, 1)


# -- graph boundaries --------------------------------------------------------------------------------------


class Clocks:
    """Rate of the SM clock against %globaltimer, and the step of that timer.

    Clocks of different GPCs run apart by 1e-4, so a kernel stamps its own SM's clock, and once, at its end, both
    timers. Steps of 32 ns are taken as if they were exact; readings are averaged over a graph's nodes.
    """

    def __init__(self, gpu: Gpu) -> None:
        import numpy

        edges, sms = 64, gpu.num_sms
        out = gpu.zeros(sms * (2 * edges + 1))
        for _ in range(3):  # the first ones bring the clock up
            gpu.launch("clock_edges", sms, 32, (out, edges), smem=BLOCK_BYTES)
        rows = out.cpu().numpy().reshape(sms, -1)
        times, clocks = rows[:, 1::2], rows[:, 2::2]
        self.origin_ns = int(times.min())
        self.step_ns = int(numpy.gcd.reduce(numpy.diff(times, axis=1).ravel()))
        self.rates = (clocks[:, -1] - clocks[:, 0]) / (times[:, -1] - times[:, 0]) * 1e9
        self.hz = float(numpy.median(self.rates))

    def us(self, clock: Any, end_clock: Any, end_ns: Any) -> Any:
        """Time of a clock stamp on %globaltimer, from a later stamp of both."""
        # Nanoseconds since 1970 leave a float 0.25 us: take off the origin before.
        return (end_ns - self.origin_ns) / 1e3 - (end_clock - clock) / self.hz * 1e6


def clock_report(gpu: Gpu, recorder: Recorder) -> None:
    """SM clock against %globaltimer, on every SM.

    Isolates: two pairs of stamps far apart, nothing between. Could mislead: an idle card has not raised its clock (the
    first launches are thrown away), and a loaded one may lower it, which shows in each case's ``sm_clock_hz``.
    """
    def sampler() -> dict[str, tuple[str, Any]]:
        found = [Clocks(gpu) for _ in range(5)]
        return {
            "sm_clock": ("Hz", [c.rates for c in found]),
            "globaltimer_step": ("ns", [c.step_ns for c in found]),
        }

    recorder.record("clocks", {}, sampler)


def node_periods(gpu: Gpu, recorder: Recorder) -> None:
    """Period of graph nodes that do nothing, by grid size, with and without PDL: what a block adds to a launch.

    Isolates: the time of 600 nodes less that of 200, so a replay's own cost falls out. Could mislead: an empty kernel
    has nothing to drain and the next launch overlaps it, so a period is less than a boundary between kernels that work;
    with PDL the slots of waiting blocks add, which is not their dispatch.
    """
    out = gpu.zeros(1 << 20)
    for name, block, pdl in (("empty", 32, False), ("empty_pdl", 32, True), ("write_rows", 256, False)):
        for blocks in (1, 8, 132, 528):
            args: Args = (out,) if name == "write_rows" else ()

            def body(
                n: int,
                name: str = name,
                blocks: int = blocks,
                block: int = block,
                pdl: bool = pdl,
                args: Args = args,
            ) -> None:
                for _ in range(n):
                    gpu.launch(name, blocks, block, args, pdl=pdl)

            short, long = gpu.graph(lambda: body(200)), gpu.graph(lambda: body(600))

            def sampler(short: Any = short, long: Any = long) -> dict[str, tuple[str, Any]]:
                import numpy

                gpu.event_us(short, 5)
                base = numpy.median(gpu.event_us(short, recorder.replays))
                return {
                    "node_period": ("us", (numpy.array(gpu.event_us(long, recorder.replays)) - base) / 400)
                }

            recorder.record("graph_node_period", {"kernel": name, "blocks": blocks, "pdl": pdl}, sampler)


def boundaries(gpu: Gpu, recorder: Recorder) -> None:
    """From the last stamp of a producer to the first of its consumer; the producer reads, waits, writes.

    Isolates: launch and release of a graph edge, by the last block's end and the first block's entry (with PDL: the
    end of its wait), for grids of 1 to 1,056 blocks, with room for both kernels on an SM and without. Could mislead:
    stamps of two SMs are compared on a timer that steps by 32 ns (averaged over the graph's nodes); the producer's
    stores are in the way between its last stamp and its end; grids of several H200 differ by up to 0.06 us.
    """
    nodes, most = 24, 8 * gpu.num_sms
    width = 16 * most
    stamps, buffers = gpu.zeros(nodes * width), [gpu.zeros(1 << 20) for _ in range(2)]

    def case(
        blocks: tuple[int, int], pdl: bool, threads: int, writes: bool, smem: tuple[int, int] = (0, 0)
    ) -> None:
        spin = 8000 if pdl else 2000

        def body() -> None:
            for i in range(nodes):
                target = buffers[1 - i % 2] if writes else ctypes.c_uint64(0)
                args = (stamps[i * width :], buffers[i % 2], target, spin, int(pdl))
                gpu.launch("node", blocks[i % 2], threads, args, smem=smem[i % 2], pdl=pdl and i > 0)

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            clocks = Clocks(gpu)
            entered, resumed, spread, load = [], [], [], []
            for _ in range(recorder.replays):
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = stamps.cpu().numpy().reshape(nodes, most, 16)
                before, after = rows[2:-1:2, : blocks[0]], rows[3::2, : blocks[1]]
                end = clocks.us(before[..., 3], before[..., 3], before[..., 4]).max(1)
                entry = clocks.us(after[..., 0], after[..., 3], after[..., 4])
                resume = clocks.us(after[..., 1], after[..., 3], after[..., 4])
                entered.append((entry.min(1) - end).mean())
                resumed.append((resume.min(1) - end).mean())
                spread.append((resume.max(1) - resume.min(1)).mean())
                load.append((after[..., 2] - after[..., 1]).mean())
            found: dict[str, tuple[str, Any]] = {
                "end_to_entry": ("us", entered),
                "first_to_last_block": ("us", spread),
                "first_load": ("cycle", load),
            }
            if pdl:
                found["end_to_resume"] = ("us", resumed)
            return found

        parameters = {
            "producer_blocks": blocks[0],
            "consumer_blocks": blocks[1],
            "threads": threads,
            "pdl": pdl,
            "bytes_written_per_block": 16 * threads * writes,
            "shared_memory": list(smem),
        }
        recorder.record("graph_boundary", parameters, sampler)

    for pdl in (False, True):
        for blocks in ((1, 1), (1, 132), (132, 1), (132, 132), (8, 8)):
            case(blocks, pdl, 256, True)
        case((1, 1), pdl, 256, False)
        case((132, 132), pdl, 256, False)
        case((most, 132), pdl, 256, True)
        # Another division of the SM's memory into shared memory and L1.
        case((132, 132), pdl, 256, True, (BLOCK_BYTES, 0))
        case((132, 8), pdl, 256, True, (BLOCK_BYTES, 0))
    fork_and_join(gpu, recorder)


def fork_and_join(gpu: Gpu, recorder: Recorder) -> None:
    """Edges between streams: P, then C1 and C2 on two streams, then J that waits for both."""
    rounds, width, blocks = 8, 16 * 132, 8
    side = gpu.torch.cuda.Stream()
    stamps, buffers = gpu.zeros(3 * rounds * width), [gpu.zeros(1 << 17) for _ in range(3)]

    def body() -> None:
        driver, main = gpu.driver, gpu.stream.cuda_stream
        disable_timing = 2
        for r in range(rounds):
            begun, ended = (gpu.call(driver.cuEventCreate(disable_timing)) for _ in range(2))
            slots = [stamps[(3 * r + i) * width :] for i in range(3)]
            gpu.launch("node", blocks, 256, (slots[0], buffers[0], buffers[0], 2000, 0))
            gpu.call(driver.cuEventRecord(begun, main))
            gpu.call(driver.cuStreamWaitEvent(side.cuda_stream, begun, 0))
            gpu.launch("node", blocks, 256, (slots[1], buffers[1], buffers[1], 2000, 0))
            gpu.launch("node", blocks, 256, (slots[2], buffers[2], buffers[2], 3000, 0), stream=side)
            gpu.call(driver.cuEventRecord(ended, side.cuda_stream))
            gpu.call(driver.cuStreamWaitEvent(main, ended, 0))

    graph = gpu.graph(body)

    def sampler() -> dict[str, tuple[str, Any]]:
        clocks, same, other, join = Clocks(gpu), [], [], []
        for _ in range(recorder.replays):
            gpu.replay(graph)
            gpu.stream.synchronize()
            rows = stamps.cpu().numpy().reshape(rounds, 3, 132, 16)[:, :, :blocks]
            entry = clocks.us(rows[..., 0], rows[..., 3], rows[..., 4]).min(-1)
            end = clocks.us(rows[..., 3], rows[..., 3], rows[..., 4]).max(-1)
            same.append((entry[:, 1] - end[:, 0]).mean())
            other.append((entry[:, 2] - end[:, 0]).mean())
            join.append((entry[1:, 0] - end[:-1, 1:].max(1)).mean())
        return {"fork_same_stream": ("us", same), "fork_other_stream": ("us", other), "join": ("us", join)}

    recorder.record("graph_fork_join", {"blocks": blocks, "threads": 256}, sampler)


# -- synchronisation ---------------------------------------------------------------------------------------


def synchronisation(gpu: Gpu, recorder: Recorder) -> None:
    """Block reduction, cluster barrier, grid barrier and fences, each in a loop of 200 on an idle GPU.

    Isolates: the loop holds one primitive and what feeds it. Could mislead: in a loop all warps and blocks arrive in
    step and nothing else uses L2; once in a kernel the slowest warp's load is waited for too (a reduction costs 0.1 to
    0.2 us more), and beside a stream near HBM's ceiling each round trip queues.
    """
    stamps, out, counter, iters = gpu.zeros(4096), gpu.zeros(4096), gpu.zeros(4, "int32"), 200

    def loop(
        probe: str, parameters: dict[str, Any], name: str, grid: int, block: int, args: Args, **how: Any
    ) -> None:
        def sampler() -> dict[str, tuple[str, Any]]:
            readings = []
            for _ in range(recorder.replays):
                counter.zero_()
                gpu.launch(name, grid, block, args, **how)
                readings.append(float(stamps[:grid].max().item()) / iters)
            hz = Clocks(gpu).hz
            return {"time": ("us", [1e6 * r / hz for r in readings])}

        recorder.record(probe, parameters, sampler)

    for threads in (128, 256, 512, 1024):
        loop("block_reduction", {"threads": threads}, "reduce_loop", 1, threads, (out, stamps, iters))
    for exchange in (0, 1):
        for grid in (8, 128):
            loop(
                "cluster_barrier",
                {"cluster": 8, "blocks": grid, "store_to_neighbour": bool(exchange)},
                "cluster_loop",
                grid,
                256,
                (stamps, iters, exchange),
                cluster=8,
            )
    for grid in (8, 64, 132):
        loop(
            "grid_barrier",
            {"blocks": grid},
            "grid_loop",
            grid,
            256,
            (counter, stamps, iters),
            smem=BLOCK_BYTES,
        )
    for scope, name in ((0, "none"), (1, "gpu"), (2, "system")):
        for threads in (32, 256):
            loop(
                "fence",
                {"scope": name, "threads": threads},
                "fence_loop",
                1,
                threads,
                (out, stamps, iters, scope),
            )


# -- a large kernel and a tiny one by turns ----------------------------------------------------------------


# Name of a stage, and the stamps at its end and start.
LARGE_STAGES = (("parameter", 1, 0), ("first_load", 2, 1), ("stream", 3, 2), ("tail", 4, 3))
TINY_STAGES = (
    ("parameter", 1, 0),
    ("prologue_or_wait", 2, 1),
    ("first_load", 3, 2),
    ("first_load_all_warps", 4, 3),
    ("dependent_load", 5, 4),
    ("dependent_load_all_warps", 6, 5),
    ("reduction", 7, 6),
    ("store", 8, 7),
    ("entry_to_end", 8, 0),
)


def tiny_kernels(gpu: Gpu, recorder: Recorder) -> None:
    """What a tiny kernel costs after a stream of cold weights, against the same kernel alone in a loop.

    Isolates: stamps divide it into parameters, first code, two dependent loads, reduction and stores; stages add up to
    the whole. Could mislead: a stage ends with one warp's stamp, and the slowest warp's time falls into the next one; a
    stamp orders instructions that would overlap; the streaming kernel beside it ends unevenly over the SMs.

    A pattern is one round of the graph: G streams weights on all SMs, t is tiny. Every kernel depends on the one
    before it.
    """
    import numpy

    rounds, width, sms = 32, 16 * 132, gpu.num_sms
    stamps = gpu.zeros(3 * rounds * width)
    mid, result, third, other, scrap = (gpu.zeros(4096) for _ in range(5))
    other.copy_(gpu.data[:8192].view(gpu.torch.int64))

    def case(
        pattern: str,
        batches: int,
        copies: int,
        blocks: int = 1,
        threads: int = 512,
        pdl: bool = False,
        rehearse: bool = False,
    ) -> None:
        wait, length = int(pdl), len(pattern)

        def body() -> None:
            source = result
            for n in range(rounds * length):
                i, slot = n // length, stamps[n * width :]
                if pattern[n % length] == "G":
                    weights = gpu.data[i * batches * sms * 512 * 8 * 4 :]
                    gpu.launch(
                        f"large_{i % min(copies, 20)}", sms, 512, (weights, batches, source, mid, slot, wait)
                    )
                    source = mid
                else:
                    target = third if source is result else result
                    args = (source, target, other, scrap, 896 // blocks, slot, wait, int(rehearse))
                    gpu.launch(f"tiny_{n % copies}", blocks, threads, args, pdl=bool(wait))
                    source = target

        graph = gpu.graph(body)

        def sampler() -> dict[str, tuple[str, Any]]:
            clocks = Clocks(gpu)
            found: dict[str, tuple[str, Any]] = {}

            def add(position: int, quantity: str, unit: str, readings: Any) -> None:
                found.setdefault(f"{position}{pattern[position]}.{quantity}", (unit, []))[1].append(readings)

            gpu.replay(graph)
            for _ in range(recorder.replays):
                gpu.replay(graph)
                gpu.stream.synchronize()
                rows = stamps[: length * rounds * width].cpu().numpy().reshape(rounds, length, 132, 16)
                begun, ended, resumed = (numpy.zeros((rounds, length)) for _ in range(3))
                for position, kind in enumerate(pattern):
                    large = kind == "G"
                    row = rows[:, position, : sms if large else blocks]
                    last, timer = (row[..., 4], row[..., 5]) if large else (row[..., 8], row[..., 9])
                    entry, end = clocks.us(row[..., 0], last, timer), clocks.us(last, last, timer)
                    begun[:, position], ended[:, position] = entry.min(1), end.max(1)
                    resumed[:, position] = clocks.us(row[..., 2], last, timer).min(1)
                    add(position, "first_to_last_entry", "us", (entry.max(1) - entry.min(1)).mean())
                    add(position, "first_to_last_end", "us", (end.max(1) - end.min(1)).mean())
                    for quantity, late, early in LARGE_STAGES if large else TINY_STAGES:
                        add(position, quantity, "cycle", (row[:, 0, late] - row[:, 0, early]).mean())
                before = numpy.roll(ended.ravel(), 1).reshape(rounds, length)
                for position, kind in enumerate(pattern):
                    add(position, "end_to_entry", "us", (begun - before)[1:, position].mean())
                    add(position, "end_to_end", "us", (ended - before)[1:, position].mean())
                    if wait and kind == "t":
                        add(position, "end_to_resume", "us", (resumed - before)[1:, position].mean())
                add(0, "period_of_round", "us", (ended[-1, -1] - ended[0, -1]) / (rounds - 1))
            return found

        parameters = {
            "pattern": pattern,
            "streamed_bytes": batches * sms * 65536,
            "copies_of_code": copies,
            "tiny_blocks": blocks,
            "tiny_threads": threads,
            "pdl": pdl,
            "rehearsed": rehearse,
        }
        recorder.record("tiny_kernel", parameters, sampler)

    for copies in (1, 8, 32):
        case("t", 0, copies)
    case("t", 0, 1, blocks=8)
    case("t", 0, 1, threads=128)
    case("t", 0, 1, pdl=True)
    for batches in (0, 1, 2, 4, 6):
        case("G", batches, 32)
    case("G", 6, 1)
    for batches, copies in ((0, 1), (0, 32), (1, 32), (6, 1), (6, 8), (6, 32)):
        case("Gt", batches, copies)
    case("Gt", 6, 32, blocks=8)
    case("Gt", 6, 32, threads=128)
    case("t", 0, 1, rehearse=True)
    case("Gt", 6, 32, rehearse=True)
    case("Gt", 6, 32, threads=128, rehearse=True)
    case("Gt", 6, 32, pdl=True)
    case("Gt", 6, 32, pdl=True, rehearse=True)
    case("Gt", 6, 32, blocks=8, pdl=True)
    case("Gtt", 6, 32)


PROBES: dict[str, Callable[[Gpu, Recorder], None]] = {
    "clocks": clock_report,
    "tiny": tiny_kernels,
    "boundaries": boundaries,
    "periods": node_periods,
    "sync": synchronisation,
    "latencies": latencies,
    "hbm": hbm_streams,
    "l2": l2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the replays, to see that all probes run"
    )
    parser.add_argument("--only", default=",".join(PROBES), help=f"comma-separated: {', '.join(PROBES)}")
    given = parser.parse_args()
    gpu = Gpu()
    try:
        recorder = Recorder(gpu, given.out, given.quick)
    except CannotResume as refusal:
        parser.error(str(refusal))
    for name in given.only.split(","):
        PROBES[name](gpu, recorder)


if __name__ == "__main__":
    main()
