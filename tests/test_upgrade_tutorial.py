"""docs/upgrade.md, run as it stands there."""

import re
from pathlib import Path

import pytest

from tests.tuning.studies import tuner

PAGE = (Path(__file__).parents[1] / "docs" / "upgrade.md").read_text()
BLOCKS = re.findall(r"```(sh|yaml)\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_tutorial_runs_as_written_and_says_what_it_shows(tmp_path: Path) -> None:
    """The demonstration runs in real time; the checks on the virtual clock."""
    folder, said = tmp_path, list[str]()
    for language, block in BLOCKS:
        if language == "yaml":
            name = block.split("\n", 1)[0].removeprefix("# ")
            (folder / name).write_text(block)
            continue
        for line in block.strip().split("\n"):
            if line.startswith("cd "):
                folder = folder / line.removeprefix("cd ")
                continue
            done = tuner(tmp_path / "home", *line.split()[1:], cwd=folder)
            assert done.returncode == 0, (line, done.stderr)
            said.append(done.stdout)
    assert len(said) == 3
    quoted = re.findall(r"^> (.*)$", PAGE, re.MULTILINE)
    answer = " ".join(said[1].split())
    for sentence in re.split(r"(?<=\.) (?=[A-Zm])", " ".join(quoted)):
        assert sentence in answer
    assert '"advice": "stay"' in said[2]
    assert '"fault": "code"' in said[2]
