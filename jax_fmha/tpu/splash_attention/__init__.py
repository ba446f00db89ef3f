"""`jax.experimental.pallas.ops.tpu.splash_attention` on our kernels: the same names."""

from jax_fmha.tpu.splash_attention import splash_attention_kernel as splash_attention_kernel
from jax_fmha.tpu.splash_attention import splash_attention_mask as splash_attention_mask
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    BlockSizes as BlockSizes,
)
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    QKVLayout as QKVLayout,
)
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    SegmentIds as SegmentIds,
)
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    SplashAttentionKernel as SplashAttentionKernel,
)
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    make_masked_mha_reference as make_masked_mha_reference,
)
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    make_masked_mqa_reference as make_masked_mqa_reference,
)
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    make_splash_mha as make_splash_mha,
)
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    make_splash_mha_single_device as make_splash_mha_single_device,
)
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    make_splash_mqa as make_splash_mqa,
)
from jax_fmha.tpu.splash_attention.splash_attention_kernel import (
    make_splash_mqa_single_device as make_splash_mqa_single_device,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    CausalMask as CausalMask,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    ChunkedCausalMask as ChunkedCausalMask,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    FullMask as FullMask,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    LocalMask as LocalMask,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    Mask as Mask,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    MultiHeadMask as MultiHeadMask,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    NumpyMask as NumpyMask,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    make_causal_mask as make_causal_mask,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    make_local_attention_mask as make_local_attention_mask,
)
from jax_fmha.tpu.splash_attention.splash_attention_mask import (
    make_random_mask as make_random_mask,
)
