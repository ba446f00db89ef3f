"""Facts about the machine that a measurement is worth nothing without."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

# The extensions that decide which kernels run, in the order of their worth.
EXTENSIONS = ("avx512f", "avx512_bf16", "amx_bf16", "avx2", "fma", "f16c", "asimd", "sve")


def pin(threads: int) -> None:
    """Confines this process to `threads` processors; to be called before jax or torch start their pools."""
    if hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < threads:
            raise SystemExit(f"--threads {threads}: this process may use {len(cpus)} processors only")
        os.sched_setaffinity(0, cpus[:threads])
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)


def facts(threads: int) -> dict[str, Any]:
    """Processor, instruction sets, threads and versions."""
    return {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "processors": os.cpu_count(),
        "threads": threads,
        "instruction_sets": [x for x in EXTENSIONS if x in _cpuinfo("flags").split()],
        "system": f"{platform.system()} {platform.machine()}",
        # Processes that wanted to run in the last minute. Much above 0 at the start, other work shares the machine.
        "load_average": round(os.getloadavg()[0], 2),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax-fmha", "jax", "jaxlib", "torch", "numpy")},
    }


def _cpuinfo(field: str) -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() in (field, {"flags": "Features"}.get(field)):
            return value.strip()
    return ""


def version(name: str) -> str | None:
    """Of an installed distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
