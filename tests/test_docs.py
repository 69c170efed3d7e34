"""The Python of the README and of the documentation runs as it stands, and the reference leaves nothing out.

Each block of the README stands alone; those of a page of the documentation follow one another, with a smaller
model in the place of the one inside the package unless JAXHYBRID_NIGHTLY is set.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

import jaxhybrid as jh
from jaxhybrid import engine

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = ROOT / "docs"


def blocks_of(text):
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


BLOCKS = blocks_of(README)
PAGES = {f"README-{i}": [block] for i, block in enumerate(BLOCKS)}
for path in sorted(DOCS.rglob("*.md")):
    if found := blocks_of(path.read_text(encoding="utf-8")):
        PAGES[path.relative_to(DOCS).as_posix()] = found


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("page", PAGES)
def test_python_example(page, small, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if not page.startswith("README") and not os.environ.get("JAXHYBRID_NIGHTLY"):
        monkeypatch.setattr(engine, "embedded_folder", lambda: small)
    names = {}
    for i, block in enumerate(PAGES[page]):
        exec(compile(block, f"{page}, block {i}", "exec"), names)
        shown = capsys.readouterr().out.strip()
        assert shown or "print(" not in block
    assert shown


def test_every_guide_has_python_that_runs():
    guides = {path.relative_to(DOCS).as_posix() for path in (DOCS / "guides").glob("*.md")}
    assert len(guides) >= 9 and guides <= set(PAGES)


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


def is_module(path):
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # what it is in is no package
        return False


def test_the_reference_has_every_public_name_once():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    paths = re.findall(r"^::: ([\w.]+)$", text, flags=re.MULTILINE)
    names = [path.rpartition(".")[2] for path in paths]
    assert len(set(names)) == len(names) and set(jh.__all__) <= set(names)
    for path in paths:
        module, _, name = path.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
        # a module of the same name would be shown in its place
        assert name == "checked" or not is_module(path)
    members = re.findall(r"members: \[(.*)\]", text)[-1]
    assert sorted(members.split(", ")) == sorted(jh.checked.__all__)


def test_every_page_is_in_the_navigation_and_every_link_leads_somewhere():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    listed = re.findall(r"^ *- [^:\n]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(listed) == sorted(pages)
    for path in (ROOT / "README.md", *DOCS.rglob("*.md")):
        for target in re.findall(r"\]\(([^)#\s]+)", path.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_drawing_is_what_its_script_draws():
    script = ROOT / "scripts" / "draw_cache.py"
    drawn = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert drawn == (DOCS / "cache.svg").read_text(encoding="utf-8")
