"""The small parts, each alone: ranking, loss, rates, streams, published directories, metrics."""

import json
import math
import random

import pytest
import torch

from reference_impl import published
from reference_impl.config import Config
from reference_impl.log import MetricsLog, plot_losses
from reference_impl.loss import listwise_loss
from reference_impl.optim import build_optimizer, build_scheduler, rate_factor
from reference_impl.ranking import ndcg, rank_of_first, reciprocal_rank, summarise
from reference_impl.rng import capture_streams, restore_streams, seed_streams


def test_ranks_count_ties_and_nan_against_the_positive():
    assert rank_of_first([3.0, 1.0, 2.0]) == 1
    assert rank_of_first([1.0, 1.0, 2.0]) == 3
    assert rank_of_first([float("nan"), 1.0, 2.0]) == 3
    assert rank_of_first([1.0, float("nan"), 0.0]) == 2


def test_mrr_and_ndcg_stop_at_ten():
    assert reciprocal_rank(4) == 0.25 and reciprocal_rank(11) == 0.0
    assert ndcg(1) == 1.0 and ndcg(3) == 0.5 and ndcg(11) == 0.0
    assert summarise([1, 3, 11]) == {
        "mrr@10": pytest.approx((1 + 1 / 3) / 3),
        "ndcg@10": pytest.approx(0.5),
        "queries": 3,
    }
    with pytest.raises(ValueError, match="no query"):
        summarise([])


def test_the_listwise_loss_is_the_softmax_of_the_positive():
    scores = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    expected = (math.log(math.exp(1.0) + 2) - 1.0 + math.log(3)) / 2
    assert listwise_loss(scores, temperature=2.0).item() == pytest.approx(expected, rel=1e-6)
    assert listwise_loss(scores.bfloat16()).dtype == torch.float32


def test_the_rate_rises_to_the_peak_and_falls_to_the_floor():
    config = Config(steps=20, warmup_steps=4, schedule="linear", min_rate_ratio=0.1)
    factors = [rate_factor(step, config) for step in range(25)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[12] == pytest.approx(0.55) and factors[20:] == pytest.approx([0.1] * 5)
    cosine = Config(steps=20, warmup_steps=4)
    assert rate_factor(12, cosine) == pytest.approx(0.5) and rate_factor(20, cosine) == pytest.approx(0.0)
    assert rate_factor(99, Config(schedule="constant")) == 1.0


def test_only_matrices_decay_and_frozen_parameters_keep_their_place():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    model[1].weight.requires_grad_(False)
    config = Config(weight_decay=0.3, learning_rate=0.5, warmup_steps=1)
    optimizer = build_optimizer(model, config)
    assert [(g["weight_decay"], [p.ndim for p in g["params"]]) for g in optimizer.param_groups] == [
        (0.3, [2]),
        (0.0, [1, 1, 1]),
    ]
    assert build_scheduler(optimizer, config).get_last_lr() == [0.25, 0.25]


def test_streams_come_back_where_they_were():
    cpu = torch.device("cpu")
    seed_streams("rank", 0, 1)
    random.gauss(0, 1)
    held = capture_streams(cpu)
    draws = [random.random(), random.gauss(0, 1), torch.rand(3).tolist()]
    seed_streams("rank", 0, 2)
    assert [random.random(), random.gauss(0, 1), torch.rand(3).tolist()] != draws
    restore_streams(held, cpu)
    assert [random.random(), random.gauss(0, 1), torch.rand(3).tolist()] == draws


def whole(root, step):
    directory = root / f"step_{step}"
    (directory / "dcp").mkdir(parents=True)
    (directory / "dcp" / ".metadata").write_bytes(b"12345")
    published.seal(directory)
    return directory


def test_steps_order_as_numbers_and_foreign_names_are_nobodys_business(tmp_path, capsys):
    assert published.newest_whole(tmp_path / "absent") is None
    for step in (9, 10, 2):
        whole(tmp_path, step)
    for name in ("step_100.backup", "step_abc", "step_011", "tmp_step_77", "step_99"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_500").symlink_to("step_2")
    published.point(tmp_path, "step_9")
    assert [step for step, _ in published.whole_checkpoints(tmp_path)] == [2, 9, 10]
    assert published.newest_whole(tmp_path).name == "step_10"
    told = capsys.readouterr().err.splitlines()
    assert told == [
        f"passing over {tmp_path / 'tmp_step_77'}: a save or a removal that was not finished",
        f"passing over {tmp_path / 'step_99'}: {tmp_path / 'step_99' / 'manifest.json'}: No such file or directory",
    ]
    assert [path.name for path in published.leftovers(tmp_path)] == ["tmp_step_77"]
    published.point(tmp_path, "step_10")
    assert (tmp_path / "latest").resolve() == tmp_path / "step_10"


def test_a_missing_or_short_file_makes_a_checkpoint_not_whole(tmp_path):
    directory = whole(tmp_path, 3)
    (directory / "dcp" / ".metadata").write_bytes(b"1234")
    assert "has 4 bytes, its manifest says 5" in published.why_not_whole(directory)
    (directory / "dcp" / ".metadata").unlink()
    assert ".metadata" in published.why_not_whole(directory)
    (directory / "manifest.json").write_text("[]")
    assert "not a manifest" in published.why_not_whole(directory)
    assert published.newest_whole(tmp_path) is None


def test_metrics_rewind_to_the_resumed_step_and_forget_a_torn_line(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", active=True)
    log.append("evaluation", 0, **{"mrr@10": 0.5})
    for step in (1, 2, 3):
        log.append("train", step, loss=1.0 / step, lr=0.1)
    with open(log.path, "a") as file:
        file.write('{"kind": "tr')
    log.rewind(2)
    assert [(r["kind"], r["step"]) for r in map(json.loads, log.path.read_text().splitlines())] == [
        ("evaluation", 0),
        ("train", 1),
        ("train", 2),
    ]
    plot_losses(log.read(), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    log.rewind(None)
    assert log.read() == []
