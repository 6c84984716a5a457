"""What a case's model and data are on disk: a transformers directory with a tokenizer, and retrieval records."""

from __future__ import annotations

import json
import random
from pathlib import Path

from contracts.case import Data, Model

WORDS = (
    "shard rank mesh moment master weight key save load resume write read sync async train loss step epoch seed norm "
    "query passage question head layer block gate bias scale shift mask pad begin end true false first last next"
).split()


def write_model(model: Model, directory: Path, *, seed: int) -> None:
    """Write a randomly initialised sequence classifier with one label, and a word-level tokenizer made offline."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from contracts.models import OddConfig, OddForSequenceClassification

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[BOS]", "[EOS]", ":", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", vocabulary["[BOS]"])])
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="right", **special).save_pretrained(directory)

    size = {"vocab_size": len(vocabulary), "hidden_size": model.hidden, "num_hidden_layers": model.layers}
    ids = {"pad_token_id": vocabulary["[PAD]"], "bos_token_id": vocabulary["[BOS]"], "eos_token_id": vocabulary["[EOS]"]}
    if model.architecture == "odd":
        kind, config = (
            OddForSequenceClassification,
            OddConfig(
                rows=list(model.rows),
                tied=model.tied,
                unused=model.unused,
                scalar=model.scalar,
                dropout=model.dropout,
                num_labels=1,
                **size,
                **ids,
            ),
        )
    else:
        from transformers import LlamaConfig, LlamaForSequenceClassification

        kind, config = (
            LlamaForSequenceClassification,
            LlamaConfig(
                intermediate_size=2 * model.hidden,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=64,
                num_labels=1,
                **size,
                **ids,
            ),
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = kind(config)
    made.to(getattr(torch, model.weights_dtype)).save_pretrained(directory)


def write_records(data: Data, path: Path, *, seed: int) -> None:
    """Write retrieval records as JSON Lines; every query and passage is distinct."""
    draw = random.Random(seed)
    with open(path, "w") as file:
        for _ in range(data.records):
            query, *passages = (" ".join(draw.choices(WORDS, k=6)) for _ in range(1 + data.passages))
            record = {"query": query, "pos_doc": passages[0], "neg_doc": passages[1:]}
            file.write(json.dumps(record) + "\n")
