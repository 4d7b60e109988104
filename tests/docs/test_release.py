"""What SECURITY.md and the page of the command line say is so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from click.shell_completion import BashComplete, FishComplete, ZshComplete

import holdfast
from holdfast.cli import VERBS, main

PACKAGE = Path(holdfast.__file__).parent
DOCS = Path(__file__).parents[2] / "docs"

UNPICKLING = {
    "worker",
    "processes",
    "ray",
    "transport",
    "packed",
    "plain_data.py",
    "state_format.py",
}
"""Between processes of one loader; and objects that a dataset has put into a state of its own, which
`loader.load_state_dict` reads."""
FORBIDDEN = {"eval", "exec", "os.system", "os.popen", "torch.load"}


def calls(path: Path) -> list[tuple[str, ast.Call]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [(ast.unparse(node.func), node) for node in found]


def test_nothing_is_unpickled_or_evaluated_but_what_passes_between_the_processes_of_a_loader() -> (
    None
):
    unpickling = set()
    for path in PACKAGE.rglob("*.py"):
        for name, call in calls(path):
            assert name not in FORBIDDEN, f"{path}:{call.lineno} calls {name}"
            assert "shell" not in {word.arg for word in call.keywords}, f"{path}:{call.lineno}"
            if name.endswith(("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads")):
                place = path.relative_to(PACKAGE)
                unpickling.add(str(place) if place.parts[0] == "engine" else place.parts[0])
    assert unpickling == UNPICKLING


def test_the_page_of_the_command_line_has_every_verb() -> None:
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert [verb for verb in VERBS if f"| [`{verb}`](" not in page] == []


@pytest.mark.parametrize("shell", [BashComplete, FishComplete, ZshComplete])
def test_the_shell_completes_verbs_and_options(shell: type[BashComplete]) -> None:
    completion = shell(main, {}, "holdfast", "_HOLDFAST_COMPLETE")
    assert [one.value for one in completion.get_completions([], "ex")] == ["explain"]
    assert "--tee" in [one.value for one in completion.get_completions(["explain"], "--t")]
    page = (DOCS / "command-line.md").read_text(encoding="utf-8")
    assert f"_HOLDFAST_COMPLETE={shell.name}_source holdfast" in page
