"""The key mapping that the installed transformers declares, judged without loading a single weight.

transformers 5 keeps its rules from published names to parameter names in one place, and two kinds of reader use them:

- `TransformersKeys` applies the declared rules and nothing else. That is what a stack gets which loads checkpoints
  itself (DCP, FSDP2) and borrows the rules.
- `FromPretrainedKeys` maps as `from_pretrained` does, which afterwards adds or removes the base model's prefix where
  that leads to a parameter, and takes back a rename that led away from one. This can hide a missing rule: in
  transformers 5.5.0 no rule moves Qwen2-VL's `visual.*` to `model.visual.*`. `from_pretrained` loads it all the same;
  a stack that borrowed the rules left the vision tower random (NVIDIA-NeMo/Automodel#2431).

Where one published tensor is split over several parameters, `map` returns the first of them.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from contracts.implementation import Capability, Implementation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from contracts.published_names import PublishedNames


class DeclaredMapping:
    """The declared rules for one model; a `contracts.implementation.KeyMapping`.

    Attributes:
        state: the model's parameters and persistent buffers by name, every alias of a tied one included.
        canonical: for each of those names, the first name of the same tensor.
        targets: the canonical names, less those the model declares may be missing.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers import conversion_mapping, core_model_loading

        rules = conversion_mapping.get_model_conversion_mapping(model)
        self.renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
        self.converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
        self.rename = core_model_loading.rename_source_key
        self.prefix = model.base_model_prefix
        self.state = model.state_dict(keep_vars=True)
        first_alias: dict[int, str] = {}
        self.canonical = {name: first_alias.setdefault(id(tensor), name) for name, tensor in self.state.items()}
        self.ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        missing = tuple(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
        self.targets = [name for name in first_alias.values() if not any(re.search(rule, name) for rule in missing)]

    def map(self, name: str) -> str | None:
        """Return where `name` goes: its one name in `targets`, itself if nothing maps it, None if it is ignored."""
        target = self._rename(name)
        if target not in self.state and any(re.search(rule, target) for rule in self.ignored):
            return None
        return self.canonical.get(target, target)

    def _rename(self, name: str) -> str:
        return self.rename(name, self.renamings, self.converters)[0]


class FromPretrainedMapping(DeclaredMapping):
    """The declared rules and what `from_pretrained` does after them."""

    def _rename(self, name: str) -> str:
        target = self.rename(name, self.renamings, self.converters, self.prefix, self.state)[0]
        if target not in self.state and name in self.state:
            return self.rename(name, [], [], self.prefix, self.state)[0]
        return target


class TransformersKeys(Implementation):
    """transformers' declared key mapping, on its own."""

    capabilities = {Capability.KEY_MAPPING}
    mapping: type[DeclaredMapping] = DeclaredMapping

    def key_mapping(self, published: PublishedNames) -> DeclaredMapping:
        """Return the mapping for the first of the configuration's `architectures`; needs transformers 5."""
        import torch
        import transformers

        config = published.config
        kind = transformers.CONFIG_MAPPING[config["model_type"]]
        architecture = getattr(transformers, config["architectures"][0])
        with torch.device("meta"):
            return self.mapping(architecture(kind.from_dict(dict(config))))


class FromPretrainedKeys(TransformersKeys):
    """transformers' key mapping as `from_pretrained` completes it."""

    mapping = FromPretrainedMapping
