"""The options of every command and of the Python API, by one set of names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

from k3sim.model.routing import REAL_TEXT_SKEW


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options by the names they have on every command; the defaults are those of ``k3sim timeline``."""

    machine: str = "gb300"
    tp: int = 16
    ep: int = 1
    dp: int = 1
    dcp: int = 1
    path: str = "fused"
    kernels: str = "public"
    with_switches: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    concurrency: int = 1
    context: int = 8192
    kv_dtype: str = "fp8"
    seed: int = 0
    skew: bool | None = None
    routing_skew: float = REAL_TEXT_SKEW
    pad_experts: bool | None = None
    model: str | None = None

    def command(self, verb: str = "timeline") -> str:
        """The command line that asks the same question."""
        import shlex

        defaults, words = Options(), ["k3sim", verb]
        for name in ("machine", "tp", "ep", "dp", "dcp", "path", "kernels", "concurrency", "context", "seed", "model"):
            if getattr(self, name) != getattr(defaults, name):
                words += [f"--{name}", str(getattr(self, name))]
        for switch in self.with_switches:
            words += ["--with", switch]
        for switch in self.without:
            words += ["--without", switch]
        if self.kv_dtype != defaults.kv_dtype:
            words += ["--kv-dtype", self.kv_dtype]
        if self.routing_skew != defaults.routing_skew:
            words += ["--routing-skew", str(self.routing_skew)]
        if self.skew is not None:
            words.append("--skew" if self.skew else "--no-skew")
        if self.pad_experts is not None:
            words.append("--pad-experts" if self.pad_experts else "--no-pad-experts")
        return shlex.join(words)

    def side(self) -> str:
        """``key=value,...`` for ``parse_side``: what one side of a comparison changes of the defaults."""
        defaults, items = Options(), []
        for name in SIDE_KEYS:
            if getattr(self, name) != getattr(defaults, name):
                items.append(f"{name.replace('_', '-')}={getattr(self, name)}")
        for key, switches in (("with", self.with_switches), ("without", self.without)):
            if switches:
                items.append(f"{key}={'+'.join(switches)}")
        return ",".join(items)


# What the two sides of a comparison may differ in, besides switches.
SIDE_KEYS = ("machine", "tp", "ep", "dp", "dcp", "path", "kernels", "concurrency", "context", "kv_dtype", "model")
