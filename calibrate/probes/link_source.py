"""Device code of the probes of links: hops, chases, exchanges, pushes and pulls.
"""

from __future__ import annotations

LINK_SOURCE = r"""
DEV u32 link_load(const u32* p) {
  u32 v; asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEV u32 link_load_acquire(const u32* p) {
  u32 v; asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
DEV void link_store(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
DEV void link_store_release(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
DEV uint4 link_load4(const uint4* p) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV void link_store4(uint4* p, u32 v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%1,%1,%1};" :: "l"(p), "r"(v) : "memory");
}
DEV bool link_is(uint4 x, u32 v) { return x.x == v && x.y == v && x.z == v && x.w == v; }

// One thread a side. form 0: a word that is its own sign. 1: 16 bytes that are. 2: 16 bytes, then a flag stored with
// release and polled with acquire. 3: 16 bytes, a fence for the system, a plain flag.
DEV void link_send(u32* at, u32 v, int form) {
  if (form == 0) link_store(at, v);
  else if (form == 1) link_store4((uint4*)at, v);
  else {
    link_store4((uint4*)(at + 32), v);
    if (form == 2) link_store_release(at, v);
    else { __threadfence_system(); link_store(at, v); }
  }
}
DEV void link_await(const u32* at, u32 v, int form) {
  if (form == 0) while (link_load(at) != v);
  else if (form == 1) while (!link_is(link_load4((const uint4*)at), v));
  else {
    if (form == 2) while (link_load_acquire(at) != v);
    else { while (link_load(at) != v); __threadfence_system(); }
    depend(link_load4((const uint4*)(at + 32)).x);
  }
}
// Two blocks: both sides on this GPU. One: the other side is a peer's launch.
KERNEL link_ping(u32* mine, u32* theirs, u32* lat, int steps, int begins, int form, int base) {
  __shared__ u32 samples[1024];
  if (threadIdx.x) return;
  u32 *own = mine, *other = theirs;
  if (gridDim.x == 2) {
    begins = blockIdx.x == 0;
    own = mine + 256 * blockIdx.x;
    other = mine + 256 * (1 - blockIdx.x);
  }
  for (int i = 1; i <= steps; ++i) {
    u64 a = clk();
    if (begins) link_send(other, base + i, form);
    link_await(own, base + i, form);
    if (!begins) link_send(other, base + i, form);
    samples[i - 1] = (u32)(clk() - a);
  }
  if (begins) for (int i = 0; i < steps; ++i) lat[i] = samples[i];
}

// Loads whose addresses follow from the load before (the region holds zeros), mean of a chain. What is waited for at
// the end is the last load as it came: a value with bits that the compiler knows lets it drop the test and the chain.
KERNEL link_chase(const u32* region, u32* lat, int steps, u32 lines, u32 seed) {
  if (threadIdx.x) return;
  u32 r = seed, v = 0;
  for (int pass = 0; pass < 2; ++pass) {
    u64 a = clk();
    for (int i = 0; i < steps; ++i) {
      r = r * 1664525u + 1013904223u + v;
      v = link_load(region + (u64)((r >> 8) % lines) * 32);
    }
    depend(v);
    lat[pass] = (u32)((clk() - a) / steps);
  }
}

// Both sides push S slots a thread and poll as many, again and again; a block waits for its slowest thread.
template <int S> DEV void link_exchange(uint4* mine, uint4* theirs, u64* timestamps, int iters, u32 base) {
  u32 threads = gridDim.x * blockDim.x, at = blockIdx.x * blockDim.x + threadIdx.x;
  u64 a = 0;
  for (int i = 1; i <= iters + 1; ++i) {
    u32 v = base + i, buffer = (i & 1) * S * threads;
    if (i == 2) a = clk();
#pragma unroll
    for (int s = 0; s < S; ++s) link_store4(theirs + buffer + s * threads + at, v);
    bool missing = true;
    while (missing) {
      missing = false;
#pragma unroll
      for (int s = 0; s < S; ++s) missing |= !link_is(link_load4(mine + buffer + s * threads + at), v);
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) timestamps[blockIdx.x] = (clk() - a) / iters;
}
#define EXCHANGE(S) \
  KERNEL link_exchange_##S(uint4* m, uint4* t, u64* s, int n, int b) { link_exchange<S>(m, t, s, n, b); }
EXCHANGE(1) EXCHANGE(2) EXCHANGE(4) EXCHANGE(7)

// Stores to a peer; a block is done when all of its stores have been performed there.
KERNEL link_push(uint4* target, u64 count, int rounds, u64* timestamps) {
  u64 begin = gtime();
  for (int round = 0; round < rounds; ++round)
    for (u64 i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x)
      link_store4(target + i, (u32)i);
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) { timestamps[2 * blockIdx.x] = begin; timestamps[2 * blockIdx.x + 1] = gtime(); }
}
KERNEL link_pull(const uint4* source, u64 count, int rounds, u64* timestamps) {
  u64 begin = gtime();
  u32 acc = 0;
  u64 batch = (u64)blockDim.x * 4;
  for (int round = 0; round < rounds; ++round)
    for (u64 i = blockIdx.x * batch + threadIdx.x; i + batch <= count + threadIdx.x; i += gridDim.x * batch) {
      uint4 v[4];
#pragma unroll
      for (int u = 0; u < 4; ++u) v[u] = link_load4(source + i + u * blockDim.x);
#pragma unroll
      for (int u = 0; u < 4; ++u) acc ^= fold(v[u]);
    }
  depend(acc);
  __syncthreads();
  if (threadIdx.x == 0) { timestamps[2 * blockIdx.x] = begin; timestamps[2 * blockIdx.x + 1] = gtime(); }
}
"""
