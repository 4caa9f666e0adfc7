"""Quoting of outside text in Python: literals, identifiers, and one line of a comment, a docstring or a table.

Names of modules, parameters, batch entries, files and options may be any text. All of it enters emitted code, the
printed IR and documents through these functions, so that it can never act as code.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jinja2

WIDTH = 120  # the width of emitted code
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|(.))", re.DOTALL)
_STRING = re.compile(r"""(['"])((?:\\.|(?!\1)[^\\])*)(\1|$)|#""")
_HIDDEN = "\ue000"  # not printable, so texts written by these functions cannot contain it
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}
_LETTERS = {character: letter for letter, character in _SHORT.items()}
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|~#!])")


def literal(text: str) -> str:
    """A Python string literal with this value, on one line."""
    mark = "'" if '"' in text and "'" not in text else '"'
    return f"{mark}{_escaped(text, mark)}{mark}"


def literal_template(text: str, fields: str) -> str:
    """An f-string: the text verbatim, then `fields`, which are the emitter's own, such as `.{i}`."""
    mark = "'" if '"' in text and "'" not in text else '"'
    return f"f{mark}{_escaped(text, mark).replace('{', '{{').replace('}', '}}')}{fields}{mark}"


def block_literal(text: str) -> str:
    """A Python literal of several lines, which begins and ends with a line break."""
    lines = (_escaped(line, '"' if '"""' in line else "") for line in _lines(text))
    return '"""\n{}\n"""'.format("\n".join(lines))


def quoted(text: str, mark: str) -> str:
    """The text between two marks, on one line; `unquoted` reads it."""
    return f"{mark}{_escaped(text, mark)}{mark}"


def unquoted(text: str) -> str:
    """The value of a text that `quoted` has written."""

    def character(match: re.Match[str]) -> str:
        number = match[1] or match[2] or match[3]
        return chr(int(number, 16)) if number else _SHORT.get(match[4], match[4])

    return _ESCAPE.sub(character, text[1:-1])


def shown(text: str) -> str:
    """The text on one line for people, with control characters escaped."""
    return text if text.isprintable() else "".join(map(_character, text))


def shown_lines(text: str) -> str:
    """Several lines for people, each escaped like by `shown`."""
    return "\n".join(map(shown, _lines(text)))


def docstring(text: str, indent: int | None = None) -> str:
    """The text inside a docstring; on several lines if these are indented and it does not fit between its quotes."""
    found = shown(text).replace("\\", "\\\\")
    found = found.replace('"', '\\"') if '"""' in found or found.endswith('"') else found
    quotes = len('"""')
    if indent is None or indent + quotes + len(found) + quotes <= WIDTH:
        return found
    lines = textwrap.wrap(found, WIDTH - indent - quotes, break_long_words=False, break_on_hyphens=False)
    return f"\n{' ' * indent}".join(lines)


def comment(text: str, indent: int = 0, prefix: str = "# ") -> str:
    """Prose as comment lines (or, without prefix, docstring lines) that fit the width; no leading indent."""
    lines = textwrap.wrap(
        shown(text),
        WIDTH - indent,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"\n{' ' * indent}".join(lines)


def markdown(text: str) -> str:
    """The text on one line of a Markdown document or table, with its markup characters escaped."""
    plain = re.fullmatch(r"[\w .,:;()/+=@&'%-]*", text, re.ASCII)
    return text if plain else _MARKUP.sub(r"\\\1", shown(text))


def identifier(text: str) -> str:
    """An ASCII identifier similar to the text; neither a keyword nor with a leading underscore."""
    found = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "value"
    found = f"m{found}" if found[0].isdigit() else found
    return f"{found}_" if keyword.iskeyword(found) or keyword.issoftkeyword(found) else found


def split_comment(code: str) -> tuple[str, str]:
    """A line of Python and its trailing comment; a # inside a string does not start one."""
    end = next((found.start() for found in _STRING.finditer(code) if not found[1]), len(code))
    return code[:end], code[end:]


def masked(code: str) -> tuple[str, tuple[str, ...]]:
    """A line of Python with the contents of its strings masked character by character, and these contents."""
    code, comment = split_comment(code)
    contents = tuple(found[2] for found in _STRING.finditer(code) if found[2])
    hidden = _STRING.sub(lambda found: f"{found[1]}{_HIDDEN * len(found[2])}{found[3]}", code)
    return hidden + comment, contents


def unmasked(code: str, contents: Iterable[str]) -> str:
    """The code with the contents restored."""
    left = iter(contents)
    return re.sub(f"{_HIDDEN}+", lambda found: next(left), code)


def encodable(text: str) -> bool:
    """Whether UTF-8 can encode the text: a lone surrogate can be in no file."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


@lru_cache(maxsize=2)
def environment(*, markup: bool = False) -> jinja2.Environment:
    """The environment of all templates; with `markup`, that of HTML templates, which escape their values."""
    import importlib.resources

    import jinja2

    folder = importlib.resources.files("partc.templates")
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (folder / name).read_text(encoding="utf-8")),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=markup,
    )
    filters: tuple[Callable[..., str], ...] = (
        literal, block_literal, shown, docstring, comment, markdown, identifier
    )  # fmt: skip
    made.filters.update((each.__name__, each) for each in filters)
    return made


def _lines(text: str) -> list[str]:
    return text.split("\n")


def _escaped(text: str, mark: str) -> str:
    """The text with escapes for the mark, for backslashes and for control characters."""
    if text.isprintable() and "\\" not in text and (not mark or mark not in text):
        return text
    return "".join(f"\\{c}" if c == "\\" or c == mark else c if c.isprintable() else _character(c) for c in text)


def _character(character: str) -> str:
    if character.isprintable():
        return character
    if character in _LETTERS:
        return f"\\{_LETTERS[character]}"
    number = ord(character)
    return f"\\x{number:02x}" if number < 256 else f"\\u{number:04x}" if number < 65536 else f"\\U{number:08x}"
