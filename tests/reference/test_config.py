"""Options are read in order, typed, and refused by name."""

import dataclasses
import re

import pytest

from reference_impl.config import Config, ConfigError, describe_options, read_config


def test_later_sources_win(tmp_path):
    (tmp_path / "run.yaml").write_text("steps: 7\nlearning_rate: 1e-3\nschedule: linear\n")
    config = read_config(tmp_path / "run.yaml", ["steps=9", "add_eos_token=true", "data=2024.jsonl", "output_dir=17"])
    assert (config.steps, config.learning_rate, config.schedule) == (9, 1e-3, "linear")
    assert (config.add_eos_token, config.data, config.output_dir) == (True, "2024.jsonl", "17")


def test_a_config_survives_its_own_dictionary():
    config = Config(steps=3, padding_side="left")
    assert Config(**config.to_dict()) == config


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learnig_rate=1", "did you mean 'learning_rate'"),
        ("steps=many", "option steps"),
        ("steps=true", "must be int"),
        ("steps=2.5", "must be int"),
        ("progress=1", "must be bool"),
        ("steps", "not key=value"),
        ("steps=0", "at least 1"),
        ("schedule=cosin", "did you mean 'cosine'"),
        ("train_n_passages=1", "at least 2"),
        ("prompt_template=passage:{passage}", "{query}"),
        ("moment_dtype=bfloat16", "force_fp32_parameters"),
        ("steps=null", "must be int"),
    ],
)
def test_a_wrong_option_is_named(override, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        read_config(None, [override])


def test_a_missing_or_malformed_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        read_config(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- steps\n")
    with pytest.raises(ConfigError, match=r"list\.yaml"):
        read_config(tmp_path / "list.yaml")
    (tmp_path / "typo.yaml").write_text("step: 3\n")
    with pytest.raises(ConfigError, match=r"typo\.yaml.*did you mean 'steps'"):
        read_config(tmp_path / "typo.yaml")


def test_force_fp32_wins_over_both_dtypes():
    config = Config(parameter_dtype="bfloat16", force_fp32_parameters=True)
    assert (config.parameters, config.moments) == ("float32", "float32")


def test_every_option_is_documented():
    text = describe_options()
    for field in dataclasses.fields(Config):
        assert f"  {field.name}=" in text and len(field.metadata["doc"]) > 4
