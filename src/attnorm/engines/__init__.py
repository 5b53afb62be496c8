"""Engines of attention: `fused` (SDPA), `one_pass`, `stick_breaking`, `sparse` (Triton), `flex`, `blocked` (all)."""
