"""Import-compatible fronts for the attention kernels of `jax.experimental.pallas.ops.tpu`, on our kernels.

Each module has the name of the original; docs/porting.md lists what differs and why.
"""
