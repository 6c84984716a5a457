"""torch: reading the state of an optimizer that has never stepped takes a step, and the first real update is the second.

`fsdp-contracts run torch_dcp --contracts order.saving-is-a-pure-read` says the same of a save at step 0.
Needs torch alone: python tests/confirmed/torch_hidden_step_on_save.py
"""

import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def first_update(read_state_first: bool) -> tuple[float, torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if read_state_first:
        get_optimizer_state_dict(model, optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer.state[model.weight]["step"].item(), model.weight.detach() - before


for read in (False, True):
    count, update = first_update(read)
    print(f"state read before the first step: {read!s:5}  step count {count}  largest update {update.abs().max():.6f}")
assert first_update(False)[0] == 1.0 and first_update(True)[0] == 2.0
