"""Runs at the start of every Python process that a rank spawns, and installs the file-event hook there."""

import importlib.util
import os
import pathlib

if "FSDP_CONTRACTS_JOB" in os.environ:
    # Loaded from its file: importing the package would import whatever the package imports.
    path = pathlib.Path(__file__).parent.parent / "file_events.py"
    spec = importlib.util.spec_from_file_location("fsdp_contracts_file_events", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install_in_spawned_process()
