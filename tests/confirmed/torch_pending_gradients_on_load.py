"""torch: with a gradient pending, state loaded into an optimizer that has never stepped is lost without a word.

`fsdp-contracts run torch_dcp --contracts order.pending-gradients-harmless` says the same of a resume.
Needs torch alone: python tests/confirmed/torch_pending_gradients_on_load.py
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4, bias=False)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: torch.nn.Module) -> None:
    model(torch.ones(1, 4)).sum().backward()


def moments_after_a_resume(directory: str, pending: bool) -> int | str:
    model, optimizer = build()
    if pending:
        backward(model)
    try:
        parameters, state = get_state_dict(model, optimizer)
        dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=directory, no_dist=True)
        set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=state)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return len(optimizer.state)


with tempfile.TemporaryDirectory() as directory:
    model, optimizer = build()
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=directory, no_dist=True)
    for pending in (False, True):
        print(f"gradient pending: {pending!s:5}  parameters with moments: {moments_after_a_resume(directory, pending)}")
    assert moments_after_a_resume(directory, False) == 1
    assert moments_after_a_resume(directory, True) != 1
