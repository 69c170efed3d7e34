"""The README's Python runs as it stands."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_python_example(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.strip()


def test_the_fork_example_shows_branches_and_the_past(capsys):
    (block,) = [b for b in BLOCKS if "jh.fork(" in b]
    found = {}
    exec(compile(block, "README.md", "exec"), found)
    length = len(found["prompt"])
    assert capsys.readouterr().out.split(")")[1].split() == [str(length), str(length - 1)]
    assert len(block.strip().splitlines()) <= 11


def test_the_two_commands_are_marked():
    for name in ("generate", "tests"):
        assert re.search(rf"^<!-- {name} -->\n```bash\n.*\n```$", README, flags=re.MULTILINE)
