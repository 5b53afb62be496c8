"""What is shipped is complete, light to import, and what its papers (README, Makefile, citation) say it is."""

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement
from typer.main import get_command

import attnorm
from attnorm.cli import app
from attnorm_lab.bench.timing import run_and_read_json

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()

# Public names that no release may lose.
PROMISED = {"attention", "available", "check_normalizer", "get", "normalize"}

IMPORTED_AS = {"pillow": "PIL"}
# Imported only where the user has installed them, or only with the tests' extras.
OPTIONAL = {
    "lm_eval",
    "nltk",
    "wonderwords",
    "peft",
    "soundfile",
    "accelerate",
    "entmax",
    "triton",
    "gguf",
    "ray",
    "submitit",
    "optuna",
}


def project_files() -> list[Path]:
    """What git tracks, or would track after `git add`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip(f"not a git checkout: {listed.stderr.strip()}")
    return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def code_blocks(*languages: str) -> Iterator[str]:
    """The README's fenced code in these languages."""
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL):
        if language in languages:
            yield code


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    given = ("WORKERS", "ARGS")  # variables of the Makefile that whoever runs the tests may have set
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", *given))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def dry_run(*arguments: str) -> str:
    run = make("--dry-run", *arguments)
    run.check_returncode()
    return run.stdout


def imported_packages(source: str) -> set[str]:
    """Top-level packages imported anywhere in the source, inside functions too."""
    names: set[str] = set()
    found: list[ast.AST] = [ast.parse(source)]
    while found:
        node = found.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):  # expressions import nothing
            inside = getattr(node, part, ())
            found += inside if isinstance(inside, list) else ()
    return {name.partition(".")[0] for name in names}


def test_the_version_is_written_once_and_told_everywhere() -> None:
    version = PROJECT["version"]
    assert attnorm.__version__ == version == importlib.metadata.version("attnorm")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {version} " in (ROOT / "CHANGELOG.md").read_text()


def test_every_public_name_exists() -> None:
    assert set(attnorm.__all__) >= PROMISED
    assert len(set(attnorm.__all__)) == len(attnorm.__all__)
    for name in attnorm.__all__:
        assert getattr(attnorm, name) is not None, name


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules that are loaded after each import of one process, and the names in attnorm after the first.

    One process, since each would import transformers again: from what needs little to what needs most.
    """
    script = """
import json, sys
import torch
before = set(sys.modules)
loaded = {"before": sorted(before)}
for name in (
    "attnorm",
    "attnorm.cli",
    "attnorm_lab.experiments.retrieval.plan",
    "attnorm_lab.training.lm.train",
    "attnorm_lab.training.needle",
    "attnorm_lab.training.retrieval.train",
    "attnorm_lab.experiments.language_models.stages",
    "attnorm_lab.experiments.clrs_text.workspace",
    "attnorm.analysis.analyze",
    "attnorm.report.plots",
):
    __import__(name)
    if name == "attnorm_lab.experiments.retrieval.plan":
        sys.modules[name].plan()
    loaded[name] = sorted(set(sys.modules) - before)
    if name == "attnorm":
        loaded["dir"] = dir(sys.modules["attnorm"])
        sys.modules["attnorm"].get("hard")
        loaded["hard"] = sorted(set(sys.modules) - before)
loaded["checked"] = ["normalize"] if hasattr(sys.modules["attnorm"].normalize, "__wrapped__") else []
print(json.dumps(loaded))
"""
    return {name: set(found) for name, found in run_and_read_json(script).items()}


def test_dir_lists_what_is_public_before_it_is_loaded_and_nothing_else(loaded: dict[str, set[str]]) -> None:
    assert {name for name in loaded["dir"] if not name.startswith("__")} == set(attnorm.__all__)


def test_importing_attnorm_loads_nothing_heavy(loaded: dict[str, set[str]]) -> None:
    heavy = {"beartype", "matplotlib", "pyarrow", "rich", "scipy", "transformers", "triton", "typer"}
    assert "attnorm.normalizers" in loaded["attnorm"]
    assert not (heavy | {"accelerate", "attnorm", "torch._dynamo"}) & loaded["before"]
    assert not heavy & loaded["attnorm"]
    assert not loaded["checked"], "users would pay for the checks of shapes"


def test_no_normalizer_is_loaded_that_was_not_asked_for(loaded: dict[str, set[str]]) -> None:
    some = {f"attnorm.normalizers.{name}" for name in ("asentmax", "stick_breaking", "topk")}
    assert not some & loaded["attnorm"]
    assert some & loaded["hard"] == {"attnorm.normalizers.topk"}


def test_the_commands_load_neither_the_compiler_nor_transformers_to_show_their_help(
    loaded: dict[str, set[str]],
) -> None:
    assert "attnorm.cli.doctor" in loaded["attnorm.cli"]
    heavy = {"torch._dynamo", "matplotlib", "pyarrow", "scipy", "transformers", "triton"}
    assert not heavy & loaded["attnorm.cli"]


def test_a_measurement_loads_neither_the_catalogue_of_claims_nor_scipys_distributions(
    loaded: dict[str, set[str]],
) -> None:
    assert "attnorm.theory.selection" in loaded["attnorm.analysis.analyze"]
    unneeded = {"attnorm_lab.errata.catalogue", "attnorm_lab.errata.search", "scipy.stats"}
    if "sklearn" in loaded["attnorm.analysis.analyze"]:  # transformers loads it if installed, and it scipy.stats
        unneeded.remove("scipy.stats")
    assert not unneeded & loaded["attnorm.analysis.analyze"]


def test_a_machine_that_only_trains_needs_no_library_for_figures_and_tables(loaded: dict[str, set[str]]) -> None:
    assert not {"matplotlib", "pyarrow", "scipy"} & loaded["attnorm_lab.experiments.retrieval.plan"]
    assert "attnorm_lab.experiments.language_models.stages" in loaded["attnorm_lab.experiments.clrs_text.workspace"]
    assert not {"matplotlib", "pyarrow"} & loaded["attnorm_lab.experiments.clrs_text.workspace"]


def test_accelerate_is_imported_only_to_train(loaded: dict[str, set[str]]) -> None:
    assert "attnorm_lab.training.needle" in loaded["attnorm_lab.training.retrieval.train"]
    assert "accelerate" not in loaded["attnorm_lab.training.retrieval.train"]


def test_figures_need_neither_pyplot_nor_a_display(loaded: dict[str, set[str]]) -> None:
    assert "matplotlib.figure" in loaded["attnorm.report.plots"]
    assert "matplotlib.pyplot" not in loaded["attnorm.report.plots"]


def test_the_source_imports_only_what_the_project_declares() -> None:
    names = {Requirement(line).name for line in PROJECT["dependencies"]}
    declared = {IMPORTED_AS.get(name, name) for name in names} | OPTIONAL | {"attnorm", "attnorm_lab"}
    for path in (ROOT / "src").rglob("*.py"):
        foreign = imported_packages(path.read_text()) - sys.stdlib_module_names
        assert foreign <= declared, f"{path.relative_to(ROOT)} imports {sorted(foreign - declared)}"


def test_the_wheel_holds_the_package_its_types_and_its_license(tmp_path: Path) -> None:
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (license,) = (archive.read(name).decode() for name in names if name.endswith("licenses/LICENSE"))
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("METADATA"))
    shipped = {name for name in names if ".dist-info/" not in name}
    expected = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert shipped >= expected | {"attnorm/py.typed"}
    assert all(name.startswith(("attnorm/", "attnorm_lab/")) for name in shipped)
    assert "Apache License" in license
    assert "END OF TERMS AND CONDITIONS" in license
    assert "License-Expression: Apache-2.0" in metadata


def test_the_readme_names_only_make_targets_that_exist() -> None:
    shell = "\n".join(code_blocks("bash", "sh", "shell", "console"))
    targets = set(re.findall(r"^(?:\$ )?make ([a-z-]+)", shell, flags=re.MULTILINE))
    assert {"test", "demo"} <= targets
    for target in targets:
        assert dry_run(target)


def test_the_readme_names_only_commands_and_options_that_exist() -> None:
    root: Any = get_command(app)
    commands = {name: root.get_command(None, name) for name in root.list_commands(None)}
    shell = "\n".join(code_blocks("bash", "sh", "shell", "console"))
    for line in re.findall(r"^(?:\$ )?attnorm (.*)$", shell, flags=re.MULTILINE):
        verb, *words = line.partition("#")[0].split()
        assert verb in commands, f"README: attnorm {line}"
        known = {option for parameter in commands[verb].params for option in parameter.opts} | {"--help"}
        given = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert given <= known, f"README: attnorm {line}"


def test_the_readme_names_only_python_names_that_exist() -> None:
    for code in code_blocks("python", "py", "pycon"):
        for name in re.findall(r"\battnorm\.(\w+)", code):
            assert hasattr(attnorm, name), f"README: attnorm.{name}"


GATES = ("ruff", "mypy", "lint-imports", "pytest")


def test_make_test_runs_every_gate() -> None:
    steps = dry_run("test")
    for gate in ("ruff check", "ruff format --check", "mypy", "lint-imports", "pytest -n 2"):
        assert f".venv/bin/{gate}" in steps


@pytest.mark.parametrize("failing", [*GATES, None])
def test_make_test_runs_lint_beside_the_tests_and_fails_with_either(tmp_path: Path, failing: str | None) -> None:
    for gate in GATES:
        program = tmp_path / gate
        # mypy ends after pytest has ended, which it never would if the tests waited for it.
        wait = f"for i in $(seq 2000); do [ -e {tmp_path}/ended ] && break; sleep 0.01; done; [ -e {tmp_path}/ended ]"
        work = {"mypy": wait, "pytest": f"touch {tmp_path}/ended"}.get(gate, "true")
        program.write_text(f"#!/bin/sh\n{work} && echo {gate} && {'false' if gate == failing else 'true'}\n")
        program.chmod(0o755)
    old = [f"--old-file={name}" for name in ("pyproject.toml", "constraints.txt")]
    run = make(*old, "test", f"BIN={tmp_path}", f"INSTALLED={tmp_path}/pytest")
    assert (run.returncode == 0) == (failing is None)
    assert run.stdout.splitlines()[-1] == "pytest"
    assert ("lint failed" in run.stderr) == (failing in GATES[:-1])
    if failing is None:
        assert run.stdout.split() == ["ruff", "ruff", "mypy", "lint-imports", "pytest"]


@pytest.mark.parametrize(
    ("changed", "unchanged"), [("pyproject.toml", "constraints.txt"), ("constraints.txt", "pyproject.toml")]
)
def test_a_changed_requirement_is_installed_before_anything_runs(changed: str, unchanged: str) -> None:
    steps = dry_run("--what-if", changed, "--old-file", unchanged, "demo")
    assert 0 <= steps.find("pip install") < steps.find("attnorm analyze")


def test_continuous_integration_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test\b", script.read_text(), flags=re.MULTILINE)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    # A home or work folder at the start of a path; addresses (https://host/home/...) are no such thing.
    local = re.compile(r"(?<![\w./:-])/(?:home|Users|root|work|mnt|opt)/[\w.-]+")
    for path in project_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        found = local.search(text)
        assert found is None, f"{path.relative_to(ROOT)} names {found[0]}"
