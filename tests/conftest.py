"""Keeps the tests on the CPU and on the package that is meant, and programs quick to compile."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile

# The contract is tested on the CPU; float32 products there are exact enough for the tolerances.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# `python -m pytest` puts the checkout in front of the installed package. Unless the extension was built in place, the
# checkout cannot be imported and the installed package is the one to test.
_ROOT = pathlib.Path(__file__).parent.parent
if not list((_ROOT / "jax_fmha").glob("_core*.so")):
    sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != _ROOT]


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes many GiB or more than half a minute")


# Almost every program of the tests runs once, on small operands, so that compiling it takes most of the time. The flags
# that fewer versions of XLA know come later.
_QUICK_TO_COMPILE = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_cpu_use_fusion_emitters=false",
)


def _compile_quickly() -> None:
    """XLA ends a process that gives it a flag it does not know, so other processes try them. Workers and examples
    inherit the environment.
    """
    trial = [sys.executable, "-c", "import jax; jax.devices()"]
    for count in range(len(_QUICK_TO_COMPILE), 0, -1):
        flags = " ".join([os.environ.get("XLA_FLAGS", ""), *_QUICK_TO_COMPILE[:count]])
        if subprocess.run(trial, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True).returncode == 0:
            os.environ["XLA_FLAGS"] = flags
            return


def _compile_once() -> tempfile.TemporaryDirectory[str] | None:
    """Workers, examples and other fresh processes compile many programs in common. Whichever comes first stores its
    own for the others, and the folder ends with this run: every run compiles every program.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    folder = tempfile.TemporaryDirectory(prefix="jax_fmha_tests_")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    return folder


if "PYTEST_XDIST_WORKER" not in os.environ:
    if os.environ["JAX_PLATFORMS"] == "cpu":
        _compile_quickly()
    _programs = _compile_once()
