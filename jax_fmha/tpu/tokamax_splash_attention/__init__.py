"""Splash attention as tokamax spells it, on our kernels."""

from jax_fmha.tpu.splash_attention import splash_attention_mask as splash_attention_mask
from jax_fmha.tpu.tokamax_splash_attention import splash_attention_kernel as splash_attention_kernel
