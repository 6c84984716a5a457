"""A model of two layers under FSDP2, and nemo-automodel's recipe for its checkpoints; the scripts beside this use it.

The environment is the one that `make env-nemo_automodel` makes: .venvs/nemo_automodel/bin/python tests/confirmed/nemo_….py
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from nemo_automodel.components.checkpoint.config import CheckpointingConfig
from nemo_automodel.components.config.loader import ConfigNode
from nemo_automodel.components.training.rng import StatefulRNG
from nemo_automodel.recipes.base_recipe import BaseRecipe
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessException, start_processes


def recipe(directory, *more_groups, unused=False) -> BaseRecipe:
    """A recipe that has taken one step, with the attributes that the stack's own recipes give theirs."""
    made = BaseRecipe()
    made.cfg = ConfigNode({"seed": 42})
    made.rng = StatefulRNG(seed=42, ranked=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    if unused:
        model.register_parameter("unused", torch.nn.Parameter(torch.ones(4)))
    model = fully_shard(model)
    made.model_parts, made.peft_config = [model], None
    made.optimizer = [torch.optim.AdamW([{"params": list(model.parameters())}, *more_groups], lr=0.1)]
    made.checkpointer = CheckpointingConfig(checkpoint_dir=str(directory)).build(dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)
    model(torch.ones(1, 4)).sum().backward()
    made.optimizer[0].step()
    return made


def _rank(rank, ranks, store, function, arguments):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=10))
    function(*arguments)
    dist.destroy_process_group()


def launch(ranks, function, directory) -> str:
    """Run `function(directory)` on as many ranks; return the last line of the first failure, or nothing."""
    store = os.path.join(directory, f"store-{function.__name__}")
    try:
        start_processes(_rank, (ranks, store, function, (directory,)), ranks, start_method="fork")
    except ProcessException as error:
        return str(error).strip().splitlines()[-1]
    return ""
