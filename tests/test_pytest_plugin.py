"""`contract_tests` in a repository of its own, against the built wheel: `tests/downstream` is copied away and run there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ElementTree
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from contracts import pytest_plugin
from contracts.lab.leases import exclusive
from contracts.suite import Verdict

REPOSITORY = Path(__file__).parents[1]

MORE_TESTS = """
from contracts import contract_tests
from test_contracts import PocketCheckpoints

test_wrongly_known = contract_tests(
    PocketCheckpoints, contracts="precision.moments-s*", known={"precision.moments-survive-resume": "issue 13"}
)
test_not_known = contract_tests(PocketCheckpoints, contracts=["order.*-optimizer"])
"""

MISTAKES = {
    "test_misspelt.py": """
from contracts import contract_tests
test_it = contract_tests("reference", known={"precision.moment-survives-resume": "issue 14"})
""",
    "test_left_out.py": """
from contracts import contract_tests
test_it = contract_tests("reference", contracts=["order.*"], known={"resume.trajectory": "issue 15"})
""",
    "test_local.py": """
from contracts import CheckpointerOnly, contract_tests
def make():
    class Local(CheckpointerOnly):
        pass
    return Local
test_it = contract_tests(make())
""",
    "test_no_such.py": """
from contracts import contract_tests
test_it = contract_tests("refrence")
""",
    "test_no_reason.py": """
from contracts import contract_tests
test_it = contract_tests("reference", known={"resume.trajectory": ""})
""",
}


@dataclass
class Installed:
    """The wheel, and an environment that has it and whatever this one has, but not this repository."""

    wheel: Path
    python: Path


@dataclass
class Project:
    """A copy of `tests/downstream`; everything it starts carries `token` in its environment."""

    installed: Installed
    root: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    def command(self, *arguments: str) -> list[str]:
        return [str(self.installed.python), "-m", "pytest", f"--basetemp={self.root / 'basetemp'}", *arguments]

    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHONPATH"))}
        path = f"{self.installed.python.parent}{os.pathsep}{os.environ['PATH']}"
        return {**inherited, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "TOKEN": self.token}

    def run(self, *command: str) -> SimpleNamespace:
        done = subprocess.run(command, cwd=self.root, env=self.environment(), capture_output=True, text=True, timeout=500)
        return SimpleNamespace(code=done.returncode, text=done.stdout + done.stderr)

    def pytest(self, *arguments: str) -> SimpleNamespace:
        result = self.run(*self.command("--junitxml=junit.xml", *arguments))
        if (self.root / "junit.xml").exists():
            cases = ElementTree.parse(self.root / "junit.xml").iter("testcase")
            result.tests = {case.get("name"): _read(case) for case in cases}
        return result

    def processes(self) -> list[str]:
        """Command lines of what this project started and still runs."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if self.token.encode() in (entry / "environ").read_bytes():
                        found.append((entry / "cmdline").read_text().replace("\0", " "))
                except OSError:
                    continue  # it has ended, or is not ours
        return found


def _read(case: ElementTree.Element) -> SimpleNamespace:
    outcome = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
    kind = "passed" if outcome is None else "xfailed" if outcome.get("type") == "pytest.xfail" else outcome.tag
    text = "" if outcome is None else f"{outcome.get('message')}\n{outcome.text}"
    properties = {each.get("name"): each.get("value") for each in case.iter("property")}
    return SimpleNamespace(outcome=kind, text=text, properties=properties)


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    base = tmp_path_factory.getbasetemp()
    base = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "installed"
    python = base / "venv" / "bin" / "python"
    with exclusive(base.with_name("installed.lock")):
        if not (base / "complete").exists():
            _call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(base / "dist"))
            _call(sys.executable, "-m", "venv", "--without-pip", str(base / "venv"))
            # A path file inside a path file is not read: torch and pytest are found there, an editable install is not.
            packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
            own = next((base / "venv").glob("lib/python*/site-packages"))
            (own / "borrowed.pth").write_text("\n".join(packages) + "\n")
            (wheel,) = (base / "dist").glob("*.whl")
            _call(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps",
                  "--ignore-installed", str(wheel))  # fmt: skip
            (base / "complete").touch()
    (wheel,) = (base / "dist").glob("*.whl")
    return Installed(wheel, python)


def _call(*command: str) -> str:
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}{done.stderr}", pytrace=False)
    return done.stdout


def _copy(installed: Installed, root: Path) -> Project:
    ignored = shutil.ignore_patterns("__pycache__", ".pytest_cache", ".contracts")
    return Project(installed, Path(shutil.copytree(REPOSITORY / "tests" / "downstream", root, ignore=ignored)))


@pytest.fixture
def project(installed, tmp_path) -> Project:
    return _copy(installed, tmp_path / "pocket")


@pytest.fixture(scope="module")
def judged(installed, tmp_path_factory) -> SimpleNamespace:
    """One session over the whole project with two workers, its result and the project."""
    project = _copy(installed, tmp_path_factory.mktemp("judged") / "pocket")
    (project.root / "tests" / "test_more.py").write_text(MORE_TESTS)
    result = project.pytest("-n", "2", "--contract-profile", "smoke", "--contract-worlds", "1,2")
    result.project = project
    return result


# --- the wheel -------------------------------------------------------------------------------------------------------


def test_the_wheel_holds_every_file_of_the_packages(installed):
    inside = set(zipfile.ZipFile(installed.wheel).namelist())
    listed = _call("git", "ls-files", "--cached", "--others", "--exclude-standard", "contracts", "reference_impl").split()
    assert {name for name in listed if (REPOSITORY / name).exists()} <= inside
    assert "contracts/lab/site/sitecustomize.py" in inside
    assert any(name.startswith("contracts/data/published_names/") for name in inside)


def test_the_project_sees_the_wheel_and_not_this_repository(project):
    said = project.run(
        str(project.installed.python), "-c", "import contracts, sys; print(contracts.__file__, *sys.path, sep='\\n')"
    )
    file, *path = said.text.split()
    assert Path(file).is_relative_to(project.installed.python.parents[1])
    assert str(REPOSITORY) not in path


# --- verdicts --------------------------------------------------------------------------------------------------------


def test_contracts_that_are_kept_pass_with_their_evidence(judged):
    for name in ("precision.moments-survive-resume", "order.params-final-before-optimizer", "publish.published-is-whole"):
        test = judged.tests[f"test_checkpoint_contracts[{name}]"]
        assert test.outcome == "passed", judged.text
        assert test.properties["worlds"] == "1,2"
        assert int(test.properties["evidence"]) > int(test.properties["cases"]) > 0


def test_a_known_failure_is_expected(judged):
    test = judged.tests["test_checkpoint_contracts[order.scheduler-after-optimizer]"]
    assert test.outcome == "xfailed"
    assert "pocket-checkpoints/issues/12" in test.text


def test_a_known_failure_that_is_kept_fails(judged):
    test = judged.tests["test_wrongly_known[precision.moments-survive-resume]"]
    assert test.outcome == "failure"
    assert "known failure precision.moments-survive-resume is kept now; remove it from known. It said: issue 13" in test.text
    assert judged.tests["test_wrongly_known[precision.moments-start-declared]"].outcome == "passed"


def test_a_broken_contract_fails_with_its_story_and_no_traceback(judged):
    test = judged.tests["test_not_known[order.scheduler-after-optimizer]"]
    assert test.outcome == "failure"
    assert "BROKEN  order.scheduler-after-optimizer" in test.text
    assert "scheduler state loaded before optimizer state" in test.text
    assert "resume, train 3" in test.text
    assert "Traceback" not in test.text
    assert "pytest_plugin.py" not in test.text


def test_the_replay_command_of_a_broken_contract_replays_it(judged):
    # Where the variable CI is set, pytest's short summary repeats the whole message.
    (printed,) = set(re.findall(r"^  replay  (.*)$", judged.text, re.MULTILINE))
    shutil.rmtree(judged.project.root / "basetemp")
    replayed = judged.project.run("bash", "-c", printed)
    assert replayed.code == 1, replayed.text
    assert "broken          order.scheduler-after-optimizer" in replayed.text


def test_contracts_that_do_not_apply_are_skipped_and_the_summary_says_why(judged):
    assert judged.tests["test_checkpoint_contracts[keys.nothing-falls-through]"].outcome == "skipped"
    assert re.search(r"not-applicable +keys\.nothing-falls-through .* does not declare key-mapping", judged.text)


def test_the_summary_counts_verdicts(judged):
    assert "PocketCheckpoints): 1 known, 7 kept, 4 not-applicable   [profile smoke, cpu, seed 0]" in judged.text
    assert "PocketCheckpoints): 1 broken, 1 kept " in judged.text


def test_a_finished_session_leaves_no_process_behind(judged):
    assert judged.project.processes() == []


def test_an_interrupt_leaves_no_process_behind(project):
    command = project.command("-p", "no:xdist", "--contract-profile", "smoke", "-k", "precision")

    def heed_interrupts() -> None:  # A shell that starts this suite in the background has them ignored, and that is inherited.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with subprocess.Popen(
        command,
        cwd=project.root,
        env=project.environment(),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        preexec_fn=heed_interrupts,
    ) as running:
        while not list(project.root.glob("basetemp/fsdp-contracts/*/histories/*/generation-0")):
            assert running.poll() is None, "pytest ended before a generation ran"
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(timeout=60) == pytest.ExitCode.INTERRUPTED
    assert project.processes() == []


# --- what is asked for wrongly, or cannot be had ---------------------------------------------------------------------


def test_mistakes_in_a_declaration_are_told_when_it_is_collected(project):
    for name, text in MISTAKES.items():
        (project.root / "tests" / name).write_text(text)
    result = project.pytest("-p", "no:xdist", "--collect-only")
    assert result.code == pytest.ExitCode.INTERRUPTED, result.text
    for message in (
        "known names 'precision.moment-survives-resume', which is no contract; did you mean precision.moments-survive-resume",
        "test_it: known names 'resume.trajectory', which contracts=('order.*',) leaves out",
        "test_it: the ranks cannot import make.<locals>.Local from test_local; define it at the top level",
        "test_it: 'refrence' is no implementation: name one of reference,",
        "TypeError: known['resume.trajectory'] must be a reason, such as the address of an issue, got ''",
    ):
        assert message in result.text


def test_gpus_that_are_not_there_are_reported_as_not_run(project):
    result = project.pytest(
        "-p",
        "no:xdist",
        "--contract-device",
        "cuda",
        "--contract-profile",
        "smoke",
        "--contract-worlds",
        "2",
        "-k",
        "trajectory",
    )
    test = result.tests["test_checkpoint_contracts[resume.trajectory]"]
    assert test.outcome == "skipped", result.text
    assert "not-run: 2 NCCL ranks need 2 GPUs; this machine has 0" in test.text
    assert re.search(r"not-run +resume\.trajectory +2 NCCL ranks need 2 GPUs", result.text)
    assert result.code == pytest.ExitCode.OK


@pytest.mark.parametrize("given", ["0", "2,x", "", "1;2"])
def test_world_sizes_that_are_none_are_bad_usage(given):
    with pytest.raises(Exception, match=re.escape(f"expected world sizes such as 1,2,4, got {given!r}")):
        pytest_plugin._worlds(given)


def test_world_sizes_are_read_in_order_and_once():
    assert pytest_plugin._worlds("4,1,4") == (4, 1)


# --- parts -----------------------------------------------------------------------------------------------------------


def test_the_plugin_imports_nothing_heavy():
    heavy = "{'torch', 'hypothesis', 'transformers', 'numpy'} & {name.partition('.')[0] for name in sys.modules}"
    said = _call(sys.executable, "-c", f"import contracts.pytest_plugin, sys; print({heavy} or 'nothing')")
    assert said.strip() == "nothing"


def test_unknown_fails_known_or_not():
    verdict = Verdict("resume.trajectory", "unknown", message="no evidence")
    for reason in (None, "issue 16"):
        with pytest.raises(pytest.fail.Exception, match=reason or "the story"):
            pytest_plugin._conclude(verdict, reason, "the story")


def test_a_known_failure_that_does_not_apply_fails():
    verdict = Verdict("resume.trajectory", "not-applicable", message="Ours does not declare resume")
    with pytest.raises(pytest.fail.Exception, match=r"is not applicable \(Ours does not declare resume\) now; remove it"):
        pytest_plugin._conclude(verdict, "issue 17", "")


def test_a_known_failure_that_was_not_run_is_skipped():
    with pytest.raises(pytest.skip.Exception, match="not-run: no GPUs"):
        pytest_plugin._conclude(Verdict("resume.trajectory", "not-run", message="no GPUs"), "issue 18", "")


def test_worlds_that_could_not_run_are_named_beside_those_that_did():
    row = {
        "contract": "resume.trajectory",
        "verdict": "kept",
        "cases": 2,
        "evidence": 9,
        "worlds": "1",
        "not_run": "2 need 2 GPUs",
    }
    lines = pytest_plugin._summary("test_it", [row | {"implementation": "ours"}], every=False)
    assert lines == ["test_it (ours): 1 kept", "  kept            resume.trajectory  in part only: 2 need 2 GPUs"]


@pytest.mark.parametrize(
    ("asked", "variable", "workers"), [("auto", "", 8), ("logical", "", None), ("auto", "3", None)], ids=str
)
def test_auto_starts_as_many_workers_as_whole_worlds_fit(monkeypatch, asked, variable, workers):
    monkeypatch.setattr("contracts.lab.leases.cores", lambda: 16)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", variable)
    config = SimpleNamespace(option=SimpleNamespace(numprocesses=asked), getoption=lambda name: "cpu")
    assert pytest_plugin.pytest_xdist_auto_num_workers(config) == workers


def test_workers_begin_with_different_cases():
    starts = []
    for worker in range(4):
        config = SimpleNamespace(workerinput={"workerid": f"gw{worker}", "workercount": 4, pytest_plugin.SEED: 0})
        starts.append(pytest_plugin._Session(config).turn(12))
    assert starts == [0, 3, 6, 9]
