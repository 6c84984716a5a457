"""A plain FSDP2 trainer for stacks that bring only a checkpointer."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from contracts.implementation import Implementation


class CheckpointerOnly(Implementation):
    """Trains the case's model with FSDP2 and AdamW; a subclass brings `save`, `finalize` and `resume`.

    The position in the data follows from `step`, so a checkpointer that restores model, optimizer, scheduler and `step`
    has restored the run. Parameters and moments are of the one dtype that is declared, float32 or bfloat16; it keeps no
    master weights.

    Attributes:
        tokenizer: the model directory's tokenizer.
        mesh: one-dimensional device mesh over all ranks.
    """

    tokenizer: Any = None

    def build(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        dtype = {name: getattr(torch, value) for name, value in vars(self.case.precision).items() if name != "masters"}
        self.tokenizer = AutoTokenizer.from_pretrained(self.place.model)
        model = AutoModelForSequenceClassification.from_pretrained(self.place.model, dtype=dtype["parameters"])
        for name, parameter in model.named_parameters():
            if self.case.model.frozen and re.search(self.case.model.frozen, name):
                parameter.requires_grad_(False)
        names = ("replicate", "shard") if self.place.mesh else ("shard",)
        self.mesh = init_device_mesh(self.place.device, self.place.mesh or (self.place.ranks,), mesh_dim_names=names)
        policy = MixedPrecisionPolicy(param_dtype=dtype["compute"], reduce_dtype=dtype["reduce"])
        model.to(self.place.device)
        for layer in model.model.layers:
            fully_shard(layer, mesh=self.mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=self.mesh, mp_policy=policy)
        self.optimizer = self._build_optimizer()
        self.scheduler = self._build_scheduler()
        self.step = 0
        with open(self.place.records) as file:
            self.records = [json.loads(line) for line in file]

    def _build_optimizer(self) -> torch.optim.Optimizer:
        declared, precision = self.case.optimizer, self.case.precision
        if precision.moments != precision.parameters or precision.masters != "none":
            raise ValueError(
                f"AdamW makes moments in its parameters' {precision.parameters} and keeps no masters; "
                f"{precision.moments} moments and masters {precision.masters} are declared"
            )
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": declared.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        if declared.empty_group:
            groups.insert(1, {"params": [], "weight_decay": 0.0})
        return torch.optim.AdamW(groups, lr=declared.lr, amsgrad=declared.amsgrad)

    def _build_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        warmup, total = self.case.optimizer.warmup_steps, self.case.optimizer.total_steps

        def factor(step: int) -> float:
            return min((step + 1) / (warmup + 1), max(0.0, (total - step) / total))

        return torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def train_step(self) -> Mapping[str, Any]:
        batch, passages = self.case.data.global_batch, self.case.data.passages
        indices = [(self.step * batch + i) % len(self.records) for i in range(batch)]
        mine = indices[self.place.rank :: self.place.ranks]
        loss_sum = torch.zeros((), device=self.place.device)
        # A rank with fewer samples of this batch than another still takes part in every collective, with one of no weight.
        passes = -(-batch // self.place.ranks)
        weighted = [(1.0, index) for index in mine] + [(0.0, 0)] * (passes - len(mine))
        for number, (weight, index) in enumerate(weighted, 1):
            record = self.records[index]
            docs = [record["pos_doc"], *record["neg_doc"]][:passages]
            texts = [f"{record['query']} : {doc}" for doc in docs]
            inputs = self.tokenizer(texts, padding="max_length", max_length=16, truncation=True, return_tensors="pt")
            inputs.pop("token_type_ids", None)
            scores = self.model(**inputs.to(self.place.device)).logits.float().view(1, passages)
            target = torch.zeros(1, dtype=torch.long, device=self.place.device)
            # FSDP averages gradients over ranks; the sum over ranks must be the mean over the global batch.
            loss = weight * F.cross_entropy(scores, target) / batch
            self.model.set_is_last_backward(number == passes)
            (loss * self.place.ranks).backward()
            loss_sum += loss.detach()
        lr = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        dist.all_reduce(loss_sum)
        return {"loss": loss_sum.item(), "lr": lr, "samples": mine}
