"""The two commands: a whole training run that resumes by itself, and an evaluation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from reference_impl.config import Config
from reference_impl.evaluate import evaluate, load_for_evaluation
from reference_impl.log import MetricsLog, ProgressBar, plot_losses
from reference_impl.trainer import Trainer


def train(config: Config) -> dict[str, Any]:
    """Train up to ``config.steps``, from the newest checkpoint in ``output_dir`` if there is one.

    Returns ``step``, ``loss`` of the last step (None if nothing was left to do), and ``before`` / ``after``, the
    evaluations around training (None where switched off).
    """
    trainer = Trainer(config)
    trainer.build()
    first = trainer.runtime.rank == 0
    log = MetricsLog(Path(config.output_dir) / "metrics.jsonl", active=first)
    resumed = trainer.resume()
    log.rewind(trainer.step if resumed else None)
    tell(first, f"resumed at step {trainer.step} of {config.steps}" if resumed else f"starting {config.steps} steps")
    if trainer.step >= config.steps:
        tell(first, f"nothing left to train: raise steps above {trainer.step}, or choose another output_dir")
    evaluations = {record["step"]: record for record in log.read() if record.pop("kind") == "evaluation"}
    if config.evaluate_around_training and not resumed:
        evaluations[0] = measure(trainer, log)
    bar = ProgressBar(total=config.steps, start=trainer.step, active=first and config.progress)
    report: dict[str, Any] = {"loss": None}
    while trainer.step < config.steps:
        report = trainer.train_step()
        log.append("train", trainer.step, **{key: report[key] for key in ("loss", "lr", "grad_norm", "seconds")})
        bar.show(report)
        every = config.checkpoint_every_steps
        if trainer.step < config.steps and every and trainer.step % every == 0:
            trainer.save()
        trainer.checkpointer.poll()
    bar.close()
    trainer.save(final=True)
    if config.evaluate_around_training:
        evaluations[trainer.step] = measure(trainer, log)
    if config.plot and first:
        plot_losses(log.read(), Path(config.output_dir) / "loss.png")
    trainer.close()
    return {
        "step": trainer.step,
        "loss": report["loss"],
        "before": evaluations.get(0),
        "after": evaluations.get(trainer.step),
    }


def measure(trainer: Trainer, log: MetricsLog) -> dict[str, Any]:
    """Evaluate now, print and record it."""
    result = evaluate(trainer)
    log.append("evaluation", trainer.step, **result)
    tell(trainer.runtime.rank == 0, f"step {trainer.step}: {describe(result)}")
    return {"step": trainer.step, **result}


def evaluate_newest(config: Config) -> dict[str, Any]:
    """Evaluate the newest checkpoint in ``output_dir``, or the untrained model if there is none."""
    trainer = Trainer(config)
    trainer.build()
    path = load_for_evaluation(trainer)
    result = {"checkpoint": path and str(path), **evaluate(trainer)}
    tell(trainer.runtime.rank == 0, f"{path or 'the untrained model (no checkpoint)'}: {describe(result)}")
    trainer.close()
    return result


def describe(result: dict[str, Any]) -> str:
    return f"MRR@10 {result['mrr@10']:.4f}  nDCG@10 {result['ndcg@10']:.4f}  ({result['queries']} queries)"


def tell(active: bool, text: str) -> None:
    if active:
        print(text, file=sys.stderr, flush=True)
