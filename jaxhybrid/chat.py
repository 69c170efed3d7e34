"""Chat templates: the jinja2 programs of model folders that write a conversation as one prompt."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxhybrid.errors import TokenizerError, UsageError


class ChatTemplate:
    """One or more named templates; "default" is used, or "tool_use" when tools are given."""

    def __init__(self, sources: Mapping[str, str], where: str):
        """`sources` maps names to jinja sources; `where` names them in messages. Raises
        TokenizerError when one cannot be compiled."""
        self.sources, self._where = dict(sources), where
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = _ENVIRONMENT.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise TokenizerError(
                    f"the chat template of {where} is wrong in line {error.lineno} "
                    f"({one_line(error)}): repair or remove it"
                ) from error
        if "default" not in self._templates:
            raise TokenizerError(
                f"{where} has no chat template named default, only "
                f"{', '.join(sorted(sources)) or 'an empty list'}: rename or add one"
            )

    def render(self, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any]) -> str:
        """The prompt of a conversation; `names` are the template's other variables.

        As in transformers 5, entries of a message that are None are left out. Raises UsageError
        for wrong messages, TokenizerError when the template refuses.
        """
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise UsageError(f"message {index} is {message!r}; give a dict with role, content")
        variables = {
            "tools": None,
            "documents": None,
            **names,
            "messages": [{k: v for k, v in m.items() if v is not None} for m in messages],
        }
        use_tools = variables["tools"] and "tool_use" in self._templates
        try:
            return self._templates["tool_use" if use_tools else "default"].render(variables)
        except Exception as error:  # a template can fail in any way Python can
            raise TokenizerError(
                f"the chat template of {self._where} refuses these messages: {one_line(error)}"
            ) from error


def read_chat_template(folder: Path, settings: Mapping[str, Any]) -> ChatTemplate | None:
    """The first of chat_template.jinja, chat_template.json and the entry in `settings`
    (tokenizer_config.json), which is a string or a list of {"name", "template"}."""
    try:
        found: Any = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        found = read_json(folder / "chat_template.json").get("chat_template")
        found = settings.get("chat_template") if found is None else found
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(
            f"{folder / 'chat_template.jinja'} cannot be read ({one_line(error)}): download it again"
        ) from error
    if found is None:
        return None
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
    if not isinstance(found, dict) or not all(isinstance(x, str) for pair in found.items() for x in pair):
        raise TokenizerError(
            f"chat_template of {folder} is neither a string nor a list of objects with name and "
            "template: repair or remove it"
        )
    return ChatTemplate(found, str(folder))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} when there is no such file; else TokenizerError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} cannot be read ({one_line(error)}): download it again") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{file} holds {type(value).__name__}, not an object: repair it")
    return value


def one_line(error: Exception) -> str:
    """An error's own words without line ends, or its type when it has none."""
    return " ".join(str(error).split())[:300] or type(error).__name__


class _GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks text to train on; it renders as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson  # jinja2's own escapes <, > and & for HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


_ENVIRONMENT = _environment()
