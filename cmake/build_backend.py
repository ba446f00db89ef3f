"""The build backend: scikit-build-core, and what a build with CUDA kernels requires besides.

`pip install . -C cmake.define.JAX_FMHA_CUDA=ON` then needs nothing on the machine but a C++ compiler: the headers of
CUTLASS come as a wheel, and nvcc too where there is none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from typing import Any

from cuda_wheels import CUTLASS, NVCC
from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403


def get_requires_for_build_wheel(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return _build.get_requires_for_build_wheel(config_settings) + _cuda_requires(config_settings)


def get_requires_for_build_editable(config_settings: Mapping[str, Any] | None = None) -> list[str]:
    return _build.get_requires_for_build_editable(config_settings) + _cuda_requires(config_settings)


def _cuda_requires(config_settings: Mapping[str, Any] | None) -> list[str]:
    asked = str((config_settings or {}).get("cmake.define.JAX_FMHA_CUDA", "OFF")).upper()
    if asked in ("OFF", "0", "NO", "FALSE", "N", ""):
        return []
    roots = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    has_nvcc = (
        "CUDACXX" in os.environ
        or shutil.which("nvcc") is not None
        or any(os.path.exists(os.path.join(root, "bin", "nvcc")) for root in roots)
    )
    if asked == "AUTO":
        return CUTLASS if has_nvcc else []
    return CUTLASS if has_nvcc else CUTLASS + NVCC
