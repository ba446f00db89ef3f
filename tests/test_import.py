"""What importing the package costs and what it must not do."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import jax_fmha

# Of processor time, so that a busy machine does not fail the test.
LIMIT_MS = 150

PROBE = """
import sys, time
import jax
before = set(sys.modules)
start = time.process_time()
import jax_fmha
print(1e3 * (time.process_time() - start))
from jax._src import xla_bridge
print(xla_bridge.backends_are_initialized())
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before}))
"""


def probe() -> tuple[float, bool, set[str]]:
    # The package under test, whatever lies in the working directory.
    home = str(Path(jax_fmha.__file__).parents[1])
    lines = subprocess.run(
        [sys.executable, "-P", "-c", PROBE],
        env=os.environ | {"PYTHONPATH": home},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return float(lines[0]), lines[1] == "True", set(lines[2].split())


@pytest.fixture(scope="module")
def probes() -> list[tuple[float, bool, set[str]]]:
    return [probe() for _ in range(5)]


def test_import_is_cheap(probes):
    costs = [milliseconds for milliseconds, _, _ in probes]
    assert statistics.median(costs) < LIMIT_MS, costs


def test_import_starts_no_backend(probes):
    assert not any(has_backend for _, has_backend, _ in probes)


def test_import_loads_only_what_it_depends_on(probes):
    """Frameworks and plotting stay out: they belong to the examples, the adapters and the benchmarks."""
    loaded = set().union(*(names for _, _, names in probes))
    assert "jax_fmha" in loaded
    assert not loaded & {"flax", "optax", "torch", "matplotlib", "hypothesis", "pytest"}, loaded
