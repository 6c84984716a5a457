"""MRR@k and nDCG@k for queries with one relevant passage each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from reference_impl.errors import UsageError


def rank_of_first(scores: Sequence[float]) -> int:
    """The 1-based rank of candidate 0. Ties count against it, so that constant scores earn nothing; so does NaN."""
    return 1 + sum(not other < scores[0] for other in scores[1:])


def reciprocal_rank(rank: int, *, k: int = 10) -> float:
    """1/rank, or 0 beyond ``k``."""
    return 1.0 / rank if rank <= k else 0.0


def ndcg(rank: int, *, k: int = 10) -> float:
    """nDCG@k of a ranking whose one relevant passage is at ``rank``: 1 / log2(1 + rank), the ideal being 1."""
    return 1.0 / math.log2(1 + rank) if rank <= k else 0.0


def summarise(ranks: Sequence[int]) -> dict[str, float | int]:
    """``mrr@10``, ``ndcg@10`` (means, 0 to 1) and ``queries``. Raises ``UsageError`` without any query."""
    if not ranks:
        raise UsageError("nothing to evaluate: no query; check eval_queries, eval_fraction and eval_data")
    return {
        "mrr@10": sum(map(reciprocal_rank, ranks)) / len(ranks),
        "ndcg@10": sum(map(ndcg, ranks)) / len(ranks),
        "queries": len(ranks),
    }
