from xformers.ops.fmha import attn_bias, memory_efficient_attention  # noqa: F401
from xformers.ops.fmha.attn_bias import LowerTriangularMask  # noqa: F401
