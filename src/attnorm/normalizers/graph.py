"""What torch is tracing."""

import torch


def is_exporting() -> bool:
    """Whether torch.export is tracing. torch.compiler.is_exporting() of torch 2.11 is true inside torch.compile too."""
    return torch.compiler._is_exporting_flag
