"""The angles of rotary positions, as tables by position.

A table, and not a cosine at each step: a library may compute an element by vector or by scalar code according to
where it stands, and a position's angle must not depend on that.
"""

import math

import torch
from torch import Tensor

from agentrt.engine.model.config import Llama3Scaling, ModelConfig


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """`cos_TR` and `sin_TR` for every position of the context and the first half of a head's dimensions."""
    exponents_R = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies_R = 1.0 / config.rope_theta**exponents_R
    if config.rope_scaling is not None:
        frequencies_R = _stretch(frequencies_R, config.rope_scaling)
    angles_TR = torch.arange(config.context_length, dtype=torch.float32).unsqueeze(1) * frequencies_R
    return angles_TR.cos(), angles_TR.sin()


def _stretch(frequencies_R: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Slow frequencies divided by the factor, fast ones kept, a ramp between."""
    turns_R = scaling.original_max_position_embeddings * frequencies_R / (2 * math.pi)
    kept_R = (turns_R - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept_R = kept_R.clamp(0.0, 1.0)
    return frequencies_R * (kept_R + (1.0 - kept_R) / scaling.factor)
