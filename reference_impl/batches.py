"""Texts to token batches, and the run's position in the data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from reference_impl.config import Config
from reference_impl.data import Split, passages_for
from reference_impl.errors import UsageError
from reference_impl.order import SampleOrder, positions_of


class DataChanged(UsageError):
    """A checkpoint was made with other data than this run reads. The message names both identities."""


@dataclass(frozen=True)
class Tokenization:
    """Everything that turns text into ids. Recorded in the checkpoint at training and pinned at evaluation."""

    prompt_template: str
    max_length: int
    add_eos_token: bool
    padding_side: str
    truncation_side: str

    @classmethod
    def declared(cls, config: Config, tokenizer: Any) -> Tokenization:
        """The config's choices, and the tokenizer's own where the config leaves them open."""
        return cls(
            prompt_template=config.prompt_template,
            max_length=config.max_length,
            add_eos_token=bool(getattr(tokenizer, "add_eos_token", False))
            if config.add_eos_token is None
            else config.add_eos_token,
            padding_side=config.padding_side or tokenizer.padding_side,
            truncation_side=config.truncation_side or tokenizer.truncation_side,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def encode(self, tokenizer: Any, pairs: Sequence[tuple[str, str]]) -> dict[str, torch.Tensor]:
        """``input_ids`` and ``attention_mask``, int64, shape (len(pairs), longest text), padded with the pad token."""
        tokenizer.padding_side, tokenizer.truncation_side = self.padding_side, self.truncation_side
        # str.replace, not format: passages and templates may hold braces of their own.
        texts = [self._prompt(query, passage) for query, passage in pairs]
        if self.add_eos_token and tokenizer.eos_token_id is None:
            raise UsageError("add_eos_token=true, but the tokenizer has no EOS token; set add_eos_token=false")
        room = self.max_length - 1 if self.add_eos_token else self.max_length
        rows = tokenizer(texts, truncation=True, max_length=room, return_token_type_ids=False)["input_ids"]
        if self.add_eos_token:
            eos = tokenizer.eos_token_id
            rows = [row if row and row[-1] == eos else [*row, eos] for row in rows]
        return dict(tokenizer.pad({"input_ids": rows}, return_tensors="pt"))

    def _prompt(self, query: str, passage: str) -> str:
        before, _, after = self.prompt_template.partition("{passage}")
        return before.replace("{query}", query) + passage + after.replace("{query}", query)


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank: ``inputs`` are the model's, shape (queries × passages, tokens), positives first."""

    inputs: dict[str, torch.Tensor]
    samples: list[int]
    positions: list[int]


class Batches:
    """The training batches of a run. Its only state is ``consumed``: how many samples all ranks together have used."""

    def __init__(self, split: Split, tokenizer: Any, tokenization: Tokenization, config: Config) -> None:
        self.split, self.tokenizer, self.tokenization, self.config = split, tokenizer, tokenization, config
        self.order = SampleOrder(len(split.train), seed=config.seed)
        self.consumed = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next sample."""
        return self.order.epoch(self.consumed)

    def take_step(self, rank: int, world: int) -> list[Batch]:
        """This rank's micro-batches of the next optimizer step; moves the run on by what all ranks take."""
        config = self.config
        batches = [
            self._batch(positions_of(rank, world, start=self.consumed, batch_size=config.batch_size, micro_batch=micro))
            for micro in range(config.accumulation_steps)
        ]
        self.consumed += config.accumulation_steps * world * config.batch_size
        return batches

    def _batch(self, positions: range) -> Batch:
        config, pairs, samples = self.config, [], []
        for position in positions:
            index = self.order.sample(position)
            key = f"{config.seed}/{self.order.epoch(position)}"
            passages = passages_for(self.split.train, index, count=config.train_n_passages, hard=config.hard_negatives, key=key)
            pairs += [(self.split.train[index].query, passage) for passage in passages]
            samples.append(index)
        return Batch(self.tokenization.encode(self.tokenizer, pairs), samples, list(positions))

    def state_dict(self) -> dict[str, Any]:
        """The position of the run (samples over all ranks), its epoch, and which data it is a position in."""
        return {
            "consumed": self.consumed,
            "epoch": self.epoch,
            "size": self.order.size,
            "identity": self.split.identity,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position. Raises :class:`DataChanged` before moving when the data is not the same."""
        if state["identity"] != self.split.identity:
            raise DataChanged(
                f"the checkpoint was trained on data {state['identity'][:12]} ({state['size']} samples), this run reads "
                f"{self.split.identity[:12]} ({self.order.size} samples) from data={self.config.data!r}; a position in "
                "one means nothing in the other: restore the data, or start in another output_dir"
            )
        self.consumed = state["consumed"]
