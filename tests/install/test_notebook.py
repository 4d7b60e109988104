"""``%load_ext holdfast`` in a real kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(120, method="thread")]

CELLS = [
    "%load_ext holdfast",
    """
import os, signal
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 20
    def __getitem__(self, index):
        if index == 7 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return index

print(sum(int(batch) for batch in DataLoader(Numbers(), num_workers=2)))
""",
    "import holdfast; print([one.kind for one in holdfast.incidents()])",
    "holdfast.incidents()",
    "loader = DataLoader([1, 2, 3]); sum(int(batch) for batch in holdfast.track(loader))",
    "holdfast.of(loader).stats()",
    """
%unload_ext holdfast
print(type(iter(DataLoader([1]))).__module__)
""",
]


def test_the_loaders_of_a_notebook_survive_a_death(tmp_path: Path) -> None:
    book: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = nbclient.NotebookClient(
        book, timeout=90, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    said = [
        [each.text for each in cell.outputs if each.get("name") == "stdout"] for cell in book.cells
    ]
    assert said == [[], ["190\n"], ["['killed']\n"], [], [], [], ["torch.utils.data.dataloader\n"]]
    table, tracked, figures = (
        [each.data for each in cell.outputs if "data" in each] for cell in book.cells[3:6]
    )
    assert "was killed by SIGKILL" in table[0]["text/plain"]
    assert "<details><summary>" in table[0]["text/html"]
    assert '<progress value="3" max="3"></progress> 3/3 · ' in tracked[0]["text/html"]
    assert tracked[1]["text/plain"] == "6"
    assert figures[0]["text/plain"].startswith("batches               3\n")
    assert figures[0]["text/html"].startswith("<table>")
