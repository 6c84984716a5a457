"""The two commands: a whole training run that resumes by itself, and an evaluation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from reference_impl.config import Config
from reference_impl.evaluate import evaluate, load_for_evaluation
from reference_impl.log import MetricsLog, ProgressBar, plot_losses
from reference_impl.stopping import Stop, end_with_launcher
from reference_impl.trainer import Trainer


def train(config: Config) -> dict[str, Any]:
    """Train up to ``config.steps``, from the newest checkpoint in ``output_dir`` if there is one.

    SIGTERM on any rank, and ``config.max_seconds``, end it after the step at hand with a checkpoint that is not final.

    Returns ``step``, ``loss`` of the last step (None if nothing was left to do), ``before`` / ``after``, the evaluations
    around training (None where switched off), and ``stopped``, what ended it early, or None.
    """
    end_with_launcher()
    stop = Stop(config.max_seconds)
    trainer = Trainer(config)
    trainer.build()
    first = trainer.runtime.rank == 0
    log = MetricsLog(Path(config.output_dir) / "metrics.jsonl", active=first)
    resumed = trainer.resume()
    log.rewind(trainer.step if resumed else None)
    start = f"resumed at step {trainer.step} of {config.steps}, from {trainer.resumed_from}"
    tell(first, start if resumed else f"starting {config.steps} steps; there is no checkpoint in {config.output_dir}")
    if trainer.step >= config.steps:
        tell(first, f"nothing left to train: raise steps above {trainer.step}, or choose another output_dir")
    evaluations = {record["step"]: record for record in log.read() if record.pop("kind") == "evaluation"}
    if config.evaluate_around_training and not resumed:
        evaluations[0] = measure(trainer, log)
    bar = ProgressBar(total=config.steps, start=trainer.step, active=first and config.progress)
    report: dict[str, Any] = {"loss": None}
    stopped = None
    while trainer.step < config.steps and stopped is None:
        report = trainer.train_step()
        log.append("train", trainer.step, **{key: report[key] for key in ("loss", "lr", "grad_norm", "seconds")})
        bar.show(report)
        if trainer.step < config.steps:
            every = config.checkpoint_every_steps
            if every and trainer.step % every == 0:
                save(trainer, log)
            stopped = stop.reason(trainer.runtime)
        trainer.checkpointer.poll()
    bar.close()
    if stopped is None:
        finish(trainer, log, evaluations)
    else:
        trainer.save()
        trainer.finalize()
        tell(first, f"stopped by {stopped} at step {trainer.step} of {config.steps}; resume with the same command")
    trainer.close()
    stop.close()
    return {
        "step": trainer.step,
        "loss": report["loss"],
        "before": evaluations.get(0),
        "after": evaluations.get(trainer.step),
        "stopped": stopped,
    }


def finish(trainer: Trainer, log: MetricsLog, evaluations: dict[int, dict[str, Any]]) -> None:
    """The end as planned: the final checkpoint, and what is reported once."""
    config = trainer.config
    evaluated = save(trainer, log, final=True)
    if config.evaluate_around_training:
        evaluations[trainer.step] = evaluated or measure(trainer, log)
    if config.plot and trainer.runtime.rank == 0:
        plot_losses(log.read(), Path(config.output_dir) / "loss.png")


def save(trainer: Trainer, log: MetricsLog, *, final: bool = False) -> dict[str, Any] | None:
    """Checkpoint this step; returns the evaluation, where the best checkpoint is chosen by one."""
    config = trainer.config
    result = measure(trainer, log) if config.keep_best and config.best_metric != "loss" else None
    trainer.save(final=final)
    return result


def measure(trainer: Trainer, log: MetricsLog) -> dict[str, Any]:
    """Evaluate now, print and record it."""
    result = evaluate(trainer)
    trainer.metrics |= {name: result[name] for name in ("mrr@10", "ndcg@10")}
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
