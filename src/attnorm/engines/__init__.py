"""Engines of attention: `fused` (SDPA), `one_pass` and `sparse` (Triton), `flex` (FlexAttention), `blocked` (all)."""
