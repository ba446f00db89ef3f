"""jax_fmha: fused multi-head attention for JAX."""

from jax_fmha._attention import (
    Explanation as Explanation,
)
from jax_fmha._attention import (
    attention as attention,
)
from jax_fmha._attention import (
    dot_product_attention as dot_product_attention,
)
from jax_fmha._attention import (
    explain as explain,
)
from jax_fmha._mask import SegmentIds as SegmentIds
from jax_fmha._mask import TileMask as TileMask
from jax_fmha._vjp import CHECKPOINT_NAMES as CHECKPOINT_NAMES

__version__ = "0.1.0"
