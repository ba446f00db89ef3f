"""Keeps the tests on the CPU and on the package that is meant."""

from __future__ import annotations

import os
import pathlib
import sys

# The contract is tested on the CPU; float32 products there are exact enough for the tolerances.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# `python -m pytest` puts the checkout in front of the installed package. Unless the extension was built in place, the
# checkout cannot be imported and the installed package is the one to test.
_ROOT = pathlib.Path(__file__).parent.parent
if not list((_ROOT / "jax_fmha").glob("_core*.so")):
    sys.path[:] = [p for p in sys.path if pathlib.Path(p or ".").resolve() != _ROOT]


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes many GiB or more than half a minute")
