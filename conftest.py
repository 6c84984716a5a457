"""This repository's pytest options."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `-n auto` starts as many workers as whole worlds fit. Half of these tests launch no world, so here it is one more.
os.environ.setdefault("PYTEST_XDIST_AUTO_NUM_WORKERS", str(1 + len(os.sched_getaffinity(0)) // 2))

# A project of its own, which tests/test_pytest_plugin.py copies elsewhere and runs against the built wheel.
collect_ignore = ["tests/downstream"]
