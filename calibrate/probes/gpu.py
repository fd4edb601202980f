"""The probes' program on the present GPU: device code that several families share, launches, graphs, rates."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

PRELUDE = r"""
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

// The same for `cycles` of the SM's clock; returns the bytes that have come by then.
DEV u64 stream_for(const char* src, u64 span, u64 cycles, u32 chunk, u32 stages, u32 block, u32 blocks) {
  extern __shared__ __align__(128) char ring[];
  __shared__ u64 bars[8];
  u32 ring_at = (u32)__cvta_generic_to_shared(ring), bar_at = (u32)__cvta_generic_to_shared(bars);
  for (u32 s = 0; s < stages; ++s)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(bar_at + 8 * s) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  u64 at = (u64)block * chunk, stride = (u64)blocks * chunk, asked = 0, come = 0, counted = 0, begin = clk();
  u32 asking = 0, coming = 0, parity = 0;
  bool open = true;
  while (open || come < asked) {
    if (open && asked < come + stages) {
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(bar_at + 8 * asking), "r"(chunk)
                   : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                   :: "r"(ring_at + asking * chunk), "l"(src + at), "r"(chunk), "r"(bar_at + 8 * asking) : "memory");
      at += stride;
      if (at >= span) at -= span;
      ++asked;
      if (++asking == stages) asking = 0;
    } else {
      u32 done = 0;
      while (!done)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                     " selp.u32 %0, 1, 0, p; }"
                     : "=r"(done) : "r"(bar_at + 8 * coming), "r"(parity) : "memory");
      ++come;
      if (++coming == stages) { coming = 0; parity ^= 1; }
      if (open && clk() - begin < cycles) counted = come;
      else open = false;
    }
  }
  return counted * chunk;
}

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
"""

BLOCK_BYTES = 200 * 1024  # of shared memory: no second block of a kernel fits on the SM
Args = Sequence[Any]


class Gpu:
    """The probes compiled for the present GPU, and what runs them: one stream, launches, graphs.

    ``source``: the program, with ``PRELUDE`` in front.
    """

    def __init__(self, source: str) -> None:
        self._load(source)
        # Values below 2^31, which `depend` relies on; random, since zeros can read faster.
        self.data = self.torch.randint(0, 2**31 - 1, (2**29,), dtype=self.torch.int32, device="cuda")

    def _load(self, source: str) -> None:
        """Compile ``source`` for the current device, and make the stream that all launches go to."""
        import torch  # type: ignore[import-not-found, unused-ignore]
        from cuda.bindings import driver  # type: ignore[import-not-found, unused-ignore]

        self.torch, self.driver = torch, driver
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.num_sms: int = properties.multi_processor_count
        self.name: str = properties.name
        self.l2_bytes: int = properties.L2_cache_size
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)
        torch.zeros(1, device="cuda")  # makes the context
        cubin = compile_probes(properties.major, properties.minor, source)
        self._module = self.call(driver.cuModuleLoadData(cubin))
        self._functions: dict[str, Any] = {}

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
        carve_out: int | None = None,
    ) -> None:
        """Launch a probe. Tensors are passed as pointers, ctypes values as they are, other numbers as int.

        ``carve_out``: percent of an SM's memory that the kernel wants as shared memory, until another launch of it, or
        the capture of one, says otherwise.
        """
        driver = self.driver
        function = self._function(name, carve_out)
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
                config, function, (tuple(values), tuple(types)) if values else 0, 0
            )
        )

    def _function(self, name: str, carve_out: int | None) -> Any:
        attribute = self.driver.CUfunction_attribute
        if name not in self._functions:
            function = self.call(self.driver.cuModuleGetFunction(self._module, name.encode()))
            most = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self.call(self.driver.cuFuncSetAttribute(function, most, BLOCK_BYTES))
            self._functions[name] = function
        function = self._functions[name]
        if carve_out is not None:
            wish = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self.call(self.driver.cuFuncSetAttribute(function, wish, carve_out))
        return function

    def graph(self, body: Callable[[], None]) -> Any:
        """The launches that ``body`` makes, as an executable graph."""
        return self.call(self.driver.cuGraphInstantiate(self.capture(body), 0))

    def capture(self, body: Callable[[], None]) -> Any:
        """The launches that ``body`` makes, as a graph."""
        driver = self.driver
        handle = self.stream.cuda_stream
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.call(driver.cuStreamBeginCapture(handle, mode))
        body()
        return self.call(driver.cuStreamEndCapture(handle))

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


def compile_probes(major: int, minor: int, source: str) -> bytes:
    """Machine code of ``source``, which has ``PRELUDE`` in front, for one compute capability."""
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


def span_rate(gpu: Gpu, graph: Any, timestamps: Any, blocks: int, num_bytes: float, count: int) -> list[float]:
    """Bytes per second of each replay, from the first block's start to the last block's end."""
    rates = []
    for _ in range(count):
        gpu.replay(graph)
        gpu.stream.synchronize()
        times = timestamps[: 2 * blocks].cpu().numpy().reshape(-1, 2)
        rates.append(1e9 * num_bytes / float(times[:, 1].max() - times[:, 0].min()))
    return rates
