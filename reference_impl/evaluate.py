"""Ranking quality on held-out queries, shared out over ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import torch.distributed as dist

from reference_impl.batches import Tokenization
from reference_impl.data import passages_for
from reference_impl.model import load_tokenizer
from reference_impl.ranking import rank_of_first, summarise
from reference_impl.trainer import Trainer


def evaluate(trainer: Trainer) -> dict[str, float | int]:
    """``mrr@10``, ``ndcg@10``, ``queries`` of the trainer's model as it is, the same on every rank.

    Each query has ``eval_n_passages`` candidates: its positive, ``eval_hard_negatives`` of its own negatives (the same
    module's, or ``neg_doc``), then others. Draws no random number and leaves the model in training mode.
    """
    config, runtime, examples = trainer.config, trainer.runtime, trainer.batches.split.evaluation
    chosen = list(range(len(examples)))
    random.Random(f"evaluation/{config.seed}").shuffle(chosen)
    chosen = chosen[: config.eval_queries]
    mine = chosen[runtime.rank :: runtime.world]
    # FSDP gathers in every forward, so every rank makes as many; a rank that has run out scores a query again, uncounted.
    rounds = -(-len(chosen) // (runtime.world * config.eval_batch_size))
    ranks: list[int] = []
    trainer.model.eval()
    with torch.no_grad():
        for turn in range(rounds):
            batch = mine[turn * config.eval_batch_size : (turn + 1) * config.eval_batch_size]
            pairs = [
                (examples[index].query, passage)
                for index in batch or chosen[:1]
                for passage in passages_for(
                    examples, index, count=config.eval_n_passages, hard=config.eval_hard_negatives, key="evaluation"
                )
            ]
            scores = trainer.scores(trainer.tokenization.encode(trainer.tokenizer, pairs)).float()
            ranks += [rank_of_first(row) for row in scores.view(-1, config.eval_n_passages).tolist()[: len(batch)]]
    trainer.model.train()
    gathered: list[list[int]] = [[] for _ in range(runtime.world)]
    dist.all_gather_object(gathered, ranks, group=runtime.control)
    return summarise([rank for part in gathered for rank in part])


def load_for_evaluation(trainer: Trainer) -> Path | None:
    """Weights, tokenizer and tokenization of the newest or the best checkpoint into a built trainer; None when there is none.

    Text is read as training read it: the recorded tokenizer and settings win over this run's configuration.
    """
    stored = trainer.checkpointer
    path = stored.best() if trainer.config.evaluate_checkpoint == "best" else stored.latest()
    if path is not None:
        trainer.load_model(path)
        trainer.cast_parameters()
        trainer.tokenizer = load_tokenizer(path / "tokenizer")
        trainer.tokenization = Tokenization(**json.loads((path / "tokenization.json").read_text()))
    return path
