"""The listwise ranking loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def listwise_loss(scores: torch.Tensor, *, temperature: float = 1.0) -> torch.Tensor:
    """Mean cross-entropy of picking the positive among each query's passages.

    ``scores``: shape (queries, passages), the positive in column 0. Computed in float32; returns a 0-dim float32 tensor.
    """
    target = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    return F.cross_entropy(scores.float() / temperature, target)
