"""The lists of published names read as they should, and so do the mappings that are judged with them."""

import json

import pytest

from contracts import published_names
from contracts.bindings import transformers_keys


@pytest.mark.parametrize(
    "names",
    [
        ["lm_head.weight"],
        ["layers.0.weight", "layers.1.weight", "layers.2.weight"],
        ["mlp.0.bias", "mlp.2.bias"],
        [f"layers.{layer}.experts.{expert}.w1" for layer in range(12) for expert in range(3)],
        ["layers.0.a", "layers.1.a", "layers.1.b"],
        ["layers.00.a", "layers.01.a"],
        [],
    ],
)
def test_folded_names_expand_to_themselves(names):
    patterns = published_names.fold(names)
    assert sorted(name for pattern in patterns for name in published_names.expand(pattern)) == sorted(names)


def test_folding_writes_one_pattern_for_a_grid():
    names = [f"layers.{layer}.experts.{expert}.w1" for layer in range(12) for expert in range(3)]
    assert published_names.fold(names) == ["layers.{0..11}.experts.{0..2}.w1"]


def test_both_ends_of_a_range_count():
    assert published_names.expand("a.{9..11}") == ("a.9", "a.10", "a.11")


def test_a_backward_range_is_refused():
    with pytest.raises(ValueError, match="ends before it begins"):
        published_names.expand("a.{3..1}")


def test_an_unknown_list_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match=r"'gwen2_vl'; available: .*qwen2_vl"):
        published_names.read("gwen2_vl")


def test_both_qwen_vl_families_are_there():
    assert {"qwen2_vl", "qwen2_5_vl"} <= set(published_names.available())


@pytest.mark.parametrize("source", published_names.available())
def test_each_list_says_what_it_is(source):
    names = published_names.read(source)
    assert len(names.source) > 40
    assert names.config["model_type"]
    assert names.config["architectures"] == [names.architecture]


@pytest.mark.parametrize("source", published_names.available())
def test_each_list_expands_without_duplicates(source):
    names = published_names.read(source).names
    assert len(names) > 100
    assert len(set(names)) == len(names)
    assert not any("{" in name for name in names)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"names": ["a.{0..3}", "a.2"]}, "'a.2' more than once"), ({"ignored": ["b"]}, "ignores 'b'")],
)
def test_a_list_that_contradicts_itself_is_refused(tmp_path, monkeypatch, change, message):
    data = {"source": "here", "architecture": "A", "config": {}, "names": ["a.0"], "ignored": []}
    (tmp_path / "mine.json").write_text(json.dumps(data | change))
    monkeypatch.setattr(published_names, "_LISTS", tmp_path)
    with pytest.raises(ValueError, match=message):
        published_names.read("mine")


def _without_rules(implementation):
    mapping = implementation(None, None).key_mapping(published_names.read("qwen2_vl"))
    mapping.renamings = mapping.converters = []
    return mapping


def test_a_missing_rule_shows_in_the_declared_mapping():
    mapping = _without_rules(transformers_keys.TransformersKeys)
    assert mapping.map("visual.patch_embed.proj.weight") not in mapping.targets


def test_from_pretrained_hides_a_missing_rule_behind_the_base_prefix():
    mapping = _without_rules(transformers_keys.FromPretrainedKeys)
    assert mapping.map("visual.patch_embed.proj.weight") == "model.visual.patch_embed.proj.weight"


def test_tied_names_have_one_target():
    mapping = transformers_keys.TransformersKeys(None, None).key_mapping(published_names.read("llama"))
    assert mapping.map("lm_head.weight") == mapping.map("model.embed_tokens.weight") == "model.embed_tokens.weight"
    assert "lm_head.weight" not in mapping.targets


def test_merged_experts_share_a_target():
    mapping = transformers_keys.TransformersKeys(None, None).key_mapping(published_names.read("mixtral"))
    experts = [f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight" for expert in range(8)]
    assert len({mapping.map(name) for name in experts}) == 1
    assert mapping.map(experts[0]) in mapping.targets
