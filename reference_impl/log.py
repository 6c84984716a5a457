"""What a run reports: a metrics file, a progress bar, a loss curve. Rank 0's business; it communicates nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from reference_impl.published import make_directory


class MetricsLog:
    """``metrics.jsonl``: one object per line with ``kind`` (train | evaluation), ``step`` and values."""

    def __init__(self, path: Path, *, active: bool) -> None:
        self.path, self.active = path, active

    def append(self, kind: str, step: int, **values: Any) -> None:
        if self.active:
            make_directory(self.path.parent)
            with open(self.path, "a") as file:
                file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """Every whole line; a last line that a crash cut short is left out."""
        records = []
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return records

    def rewind(self, step: int | None) -> None:
        """Keep what a run resumed at ``step`` has behind it; None, a fresh start, keeps nothing."""
        if not self.active or not self.path.exists():
            return
        kept = [record for record in self.read() if step is not None and record["step"] <= step]
        beside = self.path.with_suffix(".new")
        beside.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(beside, self.path)


class ProgressBar:
    """Steps done, loss and rate on one line; nothing on other ranks or with ``progress=false``."""

    def __init__(self, *, total: int, start: int, active: bool) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=total, initial=start, disable=not active, unit="step", dynamic_ncols=True)

    def show(self, report: dict[str, Any]) -> None:
        self.bar.set_postfix(loss=f"{report['loss']:.4f}", lr=f"{report['lr']:.2e}", refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def plot_losses(records: list[dict[str, Any]], path: Path) -> None:
    """The training loss and rate over steps as a PNG. Raises ``RuntimeError`` if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("plot=true needs matplotlib; install it, or set plot=false") from error
    rows = [record for record in records if record["kind"] == "train"]
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, [row["loss"] for row in rows], color="tab:blue", label="loss")
    axes.set(xlabel="optimizer step", ylabel="listwise cross-entropy (nats)", title="Training loss")
    rates = axes.twinx()
    rates.plot(steps, [row["lr"] for row in rows], color="tab:gray", alpha=0.5, label="learning rate")
    rates.set_ylabel("learning rate")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)
