"""The README: its code runs, its commands can be found, its links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    scope: dict = {}
    exec(example, scope)
    for name in "qkv":
        assert scope["d" + name].shape == scope[name].shape
    forward_and_backward, reasons = capsys.readouterr().out.splitlines()
    assert "None" not in forward_and_backward
    assert "cpu_forward" in reasons


@pytest.mark.parametrize("name", ["train", "test"])
def test_commands_are_marked_for_ci(name):
    (command,) = re.findall(rf"^<!-- command: {name} -->\n```bash\n(.*?)\n```$", README, re.MULTILINE)
    assert command.startswith("pip install '.[")
    assert f"readme_command {name}" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        if not target.startswith("https://"):
            assert (path.parent / target).exists(), target


def test_tests_named_in_the_design_exist():
    named = re.findall(r"`((?:cc/)?tests/[\w/.]+)(?:::(\w+))?`", (ROOT / "docs" / "design.md").read_text())
    assert len(named) > 20
    for path, function in named:
        assert (ROOT / path).is_file(), path
        assert not function or f"def {function}(" in (ROOT / path).read_text(), function


def test_every_promise_has_its_file_in_the_design():
    design = (ROOT / "docs" / "design.md").read_text()
    files = {path.name for path in (ROOT / "tests").glob("test_promise_*.py")}
    assert len(files) == 11
    for name in files:
        assert f"tests/{name}`" in design, name
