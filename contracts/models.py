"""The suite's own classifier, "odd": what a checkpointer meets in real models and a tiny llama has none of.

Importing this module registers it with transformers, so that every stack loads it from a directory like any other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class OddConfig(PretrainedConfig):
    """Sizes and features of `OddForSequenceClassification`; see `contracts.case.Model`."""

    model_type = "contracts_odd"

    def __init__(
        self,
        vocab_size: int = 64,
        hidden_size: int = 8,
        num_hidden_layers: int = 2,
        rows: list[int] | None = None,
        tied: str = "no",
        unused: bool = False,
        scalar: bool = False,
        dropout: float = 0.0,
        **more: object,
    ) -> None:
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.rows, self.tied, self.unused, self.scalar, self.dropout = list(rows or []), tied, unused, scalar, dropout
        more.setdefault("tie_word_embeddings", tied != "no")
        super().__init__(**more)


class OddBlock(nn.Module):
    """A residual block with a norm."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.up = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.up(self.norm(hidden)))


class OddModel(nn.Module):
    """Embedding, blocks, a non-persistent and two persistent buffers, of which one counts training forwards, unused."""

    def __init__(self, config: OddConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OddBlock(config) for _ in range(config.num_hidden_layers))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, config.hidden_size))
        self.register_buffer("ramp", torch.linspace(-1.0, 1.0, config.hidden_size), persistent=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.forwards.add_(1)
        hidden = self.embed_tokens(input_ids) * self.scale + self.ramp
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class OddForSequenceClassification(PreTrainedModel):
    """Scores a text by the mean of its tokens; every odd part takes part in the score but the unused one."""

    config_class = OddConfig
    base_model_prefix = "model"

    def __init__(self, config: OddConfig) -> None:
        super().__init__(config)
        self.model = OddModel(config)
        self.odd = nn.ModuleList(nn.Linear(config.hidden_size, rows) for rows in config.rows)
        self.score = nn.Linear(config.hidden_size, 1, bias=False)
        if config.tied != "no":
            self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.unused:
            self.unused = nn.Linear(config.hidden_size, config.hidden_size)
        if config.scalar:
            self.gain = nn.Parameter(torch.tensor(1.5))
        if config.tied == "shared":
            self._tied_weights_keys = {"output.weight": "model.embed_tokens.weight"}
        self.post_init()
        if config.tied == "shared":
            self.output.weight = self.model.embed_tokens.weight

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
        if isinstance(module, OddModel):
            # from_pretrained builds on the meta device and leaves buffers that no file holds as whatever was in memory.
            module.ramp.copy_(torch.linspace(-1.0, 1.0, len(module.ramp)))

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: object
    ) -> SequenceClassifierOutput:
        hidden = self.model(input_ids)
        weight = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (hidden * weight.unsqueeze(-1)).sum(1) / weight.sum(1, keepdim=True).clamp(min=1)
        pooled = F.dropout(pooled, self.config.dropout, self.training)
        logits = self.score(pooled)
        for part in self.odd:
            logits = logits + part(pooled).mean(-1, keepdim=True)
        if self.config.tied != "no":
            logits = logits + self.output(pooled).mean(-1, keepdim=True)
        if self.config.scalar:
            logits = logits * self.gain
        return SequenceClassifierOutput(logits=logits)


AutoConfig.register(OddConfig.model_type, OddConfig, exist_ok=True)
AutoModelForSequenceClassification.register(OddConfig, OddForSequenceClassification, exist_ok=True)
