"""A conversation on a terminal: lines with editing and history, commands, branches, colours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from jaxhybrid.conversation import Conversation
from jaxhybrid.errors import CacheFullError, CheckpointError, JaxHybridError, UsageError
from jaxhybrid.report import report
from jaxhybrid.session import load_session, save_session
from jaxhybrid.settings import Result

HELP = {
    "/edit [TEXT]": "say TEXT instead of the last message; without TEXT, edit it on the line",
    "/undo": "take the last turn back",
    "/fork NAME": "go on in a copy of the conversation",
    "/switch [NAME]": "go to another copy (the first is main); without NAME, list them",
    "/save FOLDER": "keep the conversation with its cache",
    "/load FOLDER": "go on with one that was kept",
    "/help": "this list",
    "/quit": "end the conversation, as Ctrl-D does",
}
FIRST = "main"
HISTORY_LINES = 1000


def converse(conversation: Conversation, quiet: bool, save_to: Path | None = None) -> int:
    """Talk until /quit or the end of the input; returns the exit code of the command.

    save_to: where the conversation is kept after every turn.
    """
    talk = _Talk(conversation, quiet)
    if not quiet:
        note("Type a message, or /help. Ctrl-C ends a reply, Ctrl-D the conversation.", "dim")
    with _line_editing():
        while True:
            try:
                text = _read_line(talk.name)
                if not talk.take(text):
                    return 0
                if save_to is not None and text.strip():
                    save_session(save_to, talk.here)
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:  # of a line, or of a reply before its first word
                print()
            except JaxHybridError as error:
                note(f"error: {error}", "red")


class _Talk:
    """The conversation and the copies of it, each under a name."""

    def __init__(self, conversation: Conversation, quiet: bool) -> None:
        self.branches, self.name, self.quiet = {FIRST: conversation}, FIRST, quiet

    @property
    def here(self) -> Conversation:
        return self.branches[self.name]

    def take(self, line: str) -> bool:
        """Say a line, or do what it asks for; False to end."""
        if not line.strip():
            return True
        command, _, rest = line.strip().partition(" ")
        is_command = line.startswith("/") and command[1:].isascii() and command[1:].isalpha()
        if not is_command:
            self._show(lambda: self.here.say(line, show))
            return True
        do = getattr(self, f"_{command[1:]}", None) if any(h.split()[0] == command for h in HELP) else None
        if do is None:
            raise UsageError(f"{command}: no such command, /help lists them; begin with a space to say it")
        return do(rest.strip()) is not False

    def _edit(self, text: str) -> None:
        if not text:
            text = _read_line(self.name, self.here.last_text())
        if text.strip():
            self._show(lambda: self.here.edit(text, show))

    def _undo(self, _: str) -> None:
        self.here.undo()
        self._tell()

    def _fork(self, name: str) -> None:
        if not name:
            raise UsageError("/fork: give the copy a name")
        if name in self.branches:
            raise UsageError(f"/fork {name}: there is one of this name; /switch {name} goes there")
        self.branches[name] = self.here.fork()
        self.name = name
        self._tell()

    def _switch(self, name: str) -> None:
        if not name:
            for name in self.branches:
                self._tell(name)
            return
        if name not in self.branches:
            raise UsageError(f"/switch {name}: there are {', '.join(self.branches)}; /fork makes one")
        self.name = name
        self._tell()

    def _save(self, folder: str) -> None:
        save_session(_folder("/save", folder), self.here)
        note(f"saved to {folder}", "dim")

    def _load(self, folder: str) -> None:
        path, settings = _folder("/load", folder), dict(vars(self.here.settings))
        try:
            loaded = load_session(path, self.here.model, settings)
        except CacheFullError:  # as large a context as it had
            loaded = load_session(path, self.here.model, settings | {"n_ctx": None})
        if not loaded.chat:
            raise CheckpointError(f"{folder}: was kept without --chat, it has no messages")
        self.branches[self.name] = loaded
        self._tell()

    def _help(self, _: str) -> None:
        width = max(map(len, HELP))
        for command, what in HELP.items():
            note(f"{command:{width}}  {what}")

    def _quit(self, _: str) -> bool:
        return False

    def _show(self, turn: Callable[[], Result]) -> None:
        result = turn()
        print()
        if not self.quiet:
            note(report(self.here.model, [result], computed=self.here.computed), "dim")

    def _tell(self, name: str | None = None) -> None:
        """Where a conversation stands."""
        name = name or self.name
        talk = self.branches[name]
        last = f", the last: {talk.last_text()[:40]!r}" if talk.turns else ""
        here = "*" if name == self.name else " "
        note(f"{here} {name}: {len(talk.turns)} turns, {len(talk.held)} tokens in the cache{last}", "dim")


def _folder(command: str, folder: str) -> Path:
    if not folder:
        raise UsageError(f"{command}: give a folder")
    return Path(folder).expanduser()


# ------------------------------------------------------------------------------------- the terminal


def show(text: str) -> None:
    """Print a piece of a reply as it comes."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str, style: str = "") -> None:
    """A line on standard error, with colour where that is a terminal and NO_COLOR is not set."""
    console = Console(stderr=True)
    console.print(Text(text, style="" if console.no_color else style), soft_wrap=True)


def _read_line(name: str, begun: str = "") -> str:
    """A line, or several that were pasted at once; `begun` is there already, to be edited."""
    prompt = "> " if name == FIRST else f"{name}> "
    if not sys.stdout.isatty():  # where replies go to a file, it is no place for a prompt
        sys.stderr.write(prompt)
        sys.stderr.flush()
        return input()
    console = Console()
    if console.color_system and not console.no_color:
        prompt = f"\001\033[1;36m\002{prompt}\001\033[0m\002"  # readline counts no width between 1 and 2
    with suppress(ImportError):
        import readline

        readline.set_startup_hook((lambda: readline.insert_text(begun)) if begun else None)
    return input(prompt)


@contextmanager
def _line_editing() -> Iterator[None]:
    """Editing, and a history that is kept in the user's state folder, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    if not sys.stdin.isatty():
        yield
        return
    if os.environ.get("TERM", "dumb") != "dumb":
        # pasted lines are one message; Python turns it off
        readline.parse_and_bind("set enable-bracketed-paste on")
    base = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    file = base / "jaxhybrid" / "history"
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)  # what one says is nobody else's business
        readline.read_history_file(file)
    before = readline.get_current_history_length()
    try:
        yield
    finally:
        with suppress(OSError):
            readline.set_history_length(HISTORY_LINES)
            readline.append_history_file(readline.get_current_history_length() - before, file)
