"""This repository's pytest options."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A project of its own, which tests/test_pytest_plugin.py copies elsewhere and runs against the built wheel.
collect_ignore = ["tests/downstream"]
