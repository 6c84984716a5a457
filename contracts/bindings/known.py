"""Implementations known by name, and how to resolve what a user names."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class UnknownImplementation(ValueError):
    """The name is no known implementation and no `module:Class`."""


@dataclass(frozen=True)
class Target:
    """An implementation and the interpreter of the environment it lives in.

    Attributes:
        known: contracts it is known to break, each with the reason.
    """

    name: str
    implementation: str
    python: str = sys.executable
    known: Mapping[str, str] = field(default_factory=dict)


KNOWN = {
    "reference": "reference_impl.under_contract:Reference",
    "torch_dcp": "contracts.bindings.torch_dcp:TorchDCP",
    "nemo_automodel": "contracts.bindings.nemo_automodel:NemoAutomodel",
    "transformers": "contracts.bindings.transformers_keys:TransformersKeys",
}

KNOWN_FAILURES: dict[str, dict[str, str]] = {
    "torch_dcp": {
        "crash.power-loss": "DCP flushes the files that it writes, and neither their directory nor the one it lies in"
        " (tests/confirmed/torch_dcp_flushes_no_directory.py)",
        "crash.stale-leftovers": "DCP saves into a directory that is not empty and leaves in it what was there"
        " (tests/confirmed/torch_dcp_keeps_what_was_left.py)",
        "crash.torn-file": "the error for a torn shard does not name it"
        " (tests/confirmed/torch_dcp_does_not_name_a_torn_shard.py)",
        "order.saving-is-a-pure-read": "get_state_dict makes optimizer state with a hidden step before the first save"
        " (tests/confirmed/torch_hidden_step_on_save.py)",
        "order.pending-gradients-harmless": "set_state_dict makes no room for moments while gradients are pending"
        " (tests/confirmed/torch_pending_gradients_on_load.py)",
        "precision.no-silent-cast": "DCP copies into tensors of another dtype (tests/confirmed/torch_dcp_silent_cast.py)",
        "resume.frozen-and-unused": "a parameter without optimizer state is a missing key on load"
        " (tests/confirmed/torch_dcp_cannot_resume_unused_parameters.py)",
        "resume.param-groups": "an empty group loses its settings"
        " (tests/confirmed/torch_dcp_loses_an_empty_groups_settings.py)",
        "writers.failure-reaches-everyone": "rank 0, where it cannot write a replicated file, raises before the barrier in"
        " which the others wait; this is the user's part of a save, not DCP's (tests/confirmed/torch_dcp_waits_for_rank_0.py)",
        "writers.no-local-view-branching": "each rank looks for the newest checkpoint, and DCP loads what each of them names"
        " (tests/confirmed/torch_dcp_mixes_checkpoints.py)",
    },
    "nemo_automodel": {
        "crash.disk-full": "0.7.0: a rank that cannot write raises, and the others wait for it"
        " (tests/confirmed/nemo_failure_stays_on_one_rank.py)",
        "crash.power-loss": "0.7.0: a save flushes DCP's files, and neither any other nor a directory"
        " (tests/confirmed/nemo_flushes_no_directory.py)",
        "crash.torn-file": "0.7.0: a file that a resume does not read may be torn"
        " (tests/confirmed/nemo_resumes_beside_emptied_files.py)",
        "reshard.values-across-worlds": "0.7.0: each rank loads a random state of its own, and a new rank has none"
        " (tests/confirmed/nemo_cannot_resume_on_more_ranks.py)",
        "resume.frozen-and-unused": "0.7.0: a save makes zero moments where there are none, and a resume brings them back"
        " (tests/confirmed/nemo_makes_state_for_unused_parameters.py)",
        "resume.param-groups": "0.7.0: an optimizer with an empty group is saved, and cannot be loaded"
        " (tests/confirmed/nemo_cannot_load_an_empty_group.py)",
        "writers.failure-reaches-everyone": "0.7.0: a rank that cannot write its random state tells no other"
        " (tests/confirmed/nemo_failure_stays_on_one_rank.py)",
        "writers.no-local-view-branching": "0.7.0: each rank follows LATEST itself, to what it sees"
        " (tests/confirmed/nemo_ranks_resume_at_different_steps.py)",
        "writers.one-writer-per-path": "0.7.0: every rank writes config.yaml"
        " (tests/confirmed/nemo_config_written_by_every_rank.py)",
        "writers.replicated-files-rank-0": "0.7.0: BaseRecipe.save_checkpoint calls save_config on every rank"
        " (tests/confirmed/nemo_config_written_by_every_rank.py)",
    },
}
"""What each known stack was seen to break, with the reason, and the script that shows it with that stack alone."""


def resolve(name: str, python: str | None = None) -> Target:
    """Return the target for a known name, the name of a mutant or good neighbour, or `module:Class`.

    Args:
        python: interpreter of the environment the stack lives in; by default the one under `.venvs/<name>`, which
            `make env-<name>` makes, or else this one.

    Raises:
        UnknownImplementation: nothing has that name.
    """
    if python is not None and not os.access(python, os.X_OK):
        raise UnknownImplementation(f"{python} is no interpreter; name the bin/python of the stack's environment")
    own = Path(".venvs") / name / "bin" / "python"
    interpreter = python or (str(own.absolute()) if own.exists() else sys.executable)
    if name in KNOWN:
        return Target(name, KNOWN[name], interpreter, KNOWN_FAILURES.get(name, {}))
    if ":" in name:
        return Target(name, name, interpreter)
    from reference_impl import mutants

    if name in mutants.names():
        return Target(name, mutants.names()[name], interpreter)
    raise UnknownImplementation(
        f"{name!r} is no implementation: name one of {', '.join(KNOWN)}, a mutant (see `fsdp-contracts prove`), or module:Class"
    )
