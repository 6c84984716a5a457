"""Optimizers of other packages are refused with the reason and the remedy, and used where they are there."""

import sys
import types

import pytest
import torch

from reference_impl.config import Config, ConfigError
from reference_impl.optional_optimizers import SOURCES, build_optional, make_room

CPU = torch.device("cpu")


def absent(monkeypatch, module):
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    ("name", "install"), [("flashoptim", "pip install flashoptim"), ("torchao_adamw8bit", "pip install torchao")]
)
def test_what_is_not_installed_is_refused_with_what_to_install(monkeypatch, name, install):
    absent(monkeypatch, SOURCES[name].module)
    with pytest.raises(ConfigError, match=rf"optimizer={name} .*cannot be imported: .*{install}.*or set optimizer=adamw"):
        build_optional([], {}, Config(optimizer=name), CPU)


def test_what_needs_a_gpu_is_refused_on_a_cpu():
    with pytest.raises(
        ConfigError, match=r"te_fused_adam .*FusedAdam. is a CUDA kernel, and the model is on cpu; run on a GPU"
    ):
        build_optional([], {}, Config(optimizer="te_fused_adam"), CPU)


def test_a_package_that_fails_while_it_is_imported_says_so_itself(monkeypatch, tmp_path):
    (tmp_path / "flashoptim.py").write_text("import no_such_triton\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flashoptim", raising=False)
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'no_such_triton'"):
        build_optional([], {}, Config(optimizer="flashoptim"), CPU)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"amsgrad": True}, "has no amsgrad"),
        ({"parameter_dtype": "bfloat16", "master_dtype": "float32"}, "keeps no float32 masters"),
    ],
)
def test_what_an_optimizer_cannot_do_is_refused_before_it_is_imported(options, said):
    with pytest.raises(ConfigError, match=said):
        build_optional([], {}, Config(optimizer="flashoptim", **options), CPU)


def test_an_installed_one_gets_the_groups_and_keeps_what_is_declared(monkeypatch):
    monkeypatch.setitem(
        sys.modules, "flashoptim", types.SimpleNamespace(FlashAdamW=lambda groups, **options: (groups, options))
    )
    groups, options = build_optional([{"params": []}], {"lr": 0.1, "amsgrad": False}, Config(optimizer="flashoptim"), CPU)
    assert groups == [{"params": []}]
    assert options == {"lr": 0.1, "quantize": False, "master_weight_bits": None, "fused": False}


def test_making_room_changes_neither_parameters_nor_gradients_nor_rates():
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.AdamW([weight], lr=torch.tensor(0.5), weight_decay=0.1)
    make_room(optimizer)
    assert weight.tolist() == [1.0, -2.0] and weight.grad.tolist() == [3.0, 4.0] and optimizer.param_groups[0]["lr"] == 0.5
    assert set(optimizer.state[weight]) == {"step", "exp_avg", "exp_avg_sq"}
