"""A tiny Llama scorer directory, made offline: two layers, hidden 8, a word-level tokenizer with a pad token."""

from __future__ import annotations

import json
from pathlib import Path

NAMES = ["alpha", "beta", "gamma", "delta", "rho", "sigma", "tau", "phi", "omega"]
PLAIN = ["the", "of", "and", "to", "in", "is", "a", "for", "with"]
WORDS = ["question", "passage", *NAMES, *PLAIN, ":", "."]


def make_tiny_model(directory: Path, *, dtype: str = "float32", seed: int = 7) -> Path:
    """Save the model (``dtype`` on disk) and its tokenizer into ``directory``."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForSequenceClassification, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "</s>", *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", eos_token="</s>").save_pretrained(
        directory
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        LlamaForSequenceClassification(
            LlamaConfig(
                vocab_size=len(words),
                hidden_size=8,
                intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                num_labels=1,
                pad_token_id=0,
                attention_dropout=0.1,
                max_position_embeddings=128,
            )
        ).to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def make_tiny_data(path: Path, *, records: int = 11) -> Path:
    """JSON Lines whose queries and passages use the tiny model's words."""
    lines = []
    for index in range(records):
        word = NAMES[index % 9]
        other = NAMES[(index + 4) % 9]
        lines.append(
            {
                "query": f"the {word} {PLAIN[index % 8]}",
                "pos_doc": f"{word} is {word} {index}",
                "neg_doc": [f"{other} of a {index}", f"a {other}"],
            }
        )
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path
