"""The wheels that a build with CUDA kernels takes from PyPI: CUTLASS's headers, and nvcc where there is no toolkit.

`pip install $(python cmake/cuda_wheels.py)` brings them for a build with plain CMake.
"""

from __future__ import annotations

CUTLASS = ["nvidia-cutlass==4.2.0.0"]
NVCC = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-runtime==13.0.96",
]

if __name__ == "__main__":
    print(*CUTLASS, *NVCC, sep="\n")
