"""How attention is computed: `fused` on torch's SDPA, `flex` on FlexAttention (CUDA), `blocked` for everything else."""
