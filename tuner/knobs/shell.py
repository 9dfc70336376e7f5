"""Splits shell text into commands and words: quotes, comments, variables, arrays, conditions,
here-documents. Batch files and PowerShell scripts are first rewritten for a POSIX shell.

Some text has no counterpart there (`%~dp0`, a pipeline of PowerShell). It becomes a variable without a
value, which is named where it is needed. Nothing is executed.
"""

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.errors import BadInput

# Marks, before and after its name, a variable whose value is not known here.
UNKNOWN = "\ue000"

# Stands for a dollar sign that the shell does not expand.
DOLLAR = "\ue001"
_ARRAY, _BLANK = "\ue002", "\ue003"
_VARIABLE = re.compile(
    r"\$(?:\{(?P<brace>\w+)(?:\[[@*]\])?(?P<instead>:?[-=][^{}]*|[^{}]*)?\}|\((?P<kube>\w+)\)|(?P<plain>\w+|[@*#?]))"
)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?=)(.*)", re.DOTALL)
_OPERATOR = re.compile(r"&&|\|\||;;|\|&|&>>?|\d?>>?&?|\d?<<?<?-?|[;|&\n()]")
_REDIRECTION = re.compile(r"\d?[<>].*|&>>?")
_OPENS = frozenset(("if", "for", "while", "until", "case", "select"))
_CLOSES = frozenset(("fi", "done", "esac"))
_LEADS = frozenset(("then", "do", "else", "elif", "{", "}", "!", "time", *_OPENS, *_CLOSES))

# Finds a start of vLLM in a text.
START = re.compile(r"(?<![\w-])vllm[\s'\",]+serve\b|vllm[./]entrypoints[./][\w./]*\b|\bapi_server\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One simple command: its words, the variables that are set before it, and those of them that are
    exported.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    exported: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def commands(text: str, where: str, env: Mapping[str, str] | None = None) -> list[Command]:
    """The commands of a script or a command line, with variables replaced by their known values.

    A command in a condition is read as if the condition held; there, a variable that already has a value
    keeps it. BadInput for a quote that is not closed.
    """
    return list(_Script(where, dict(env or {})).read(text))


def split(text: str, where: str, *, by_shell: bool = True) -> list[str]:
    """The words of a command line. Quotes are taken off, variables are not filled in. BadInput for a quote
    that is not closed.

    A shell's operators and redirections are left out; with `by_shell=False` (systemd, variables that hold
    arguments) they are ordinary words.
    """
    if by_shell:
        words = _words(_tokens(text.replace("$", DOLLAR), where))
        return [word.replace(_BLANK, "").replace(DOLLAR, "$") for word in words]
    try:
        return shlex.split(text)
    except ValueError as error:
        why = "a line ends with a backslash and a blank" if "escaped" in str(error) else error
        raise BadInput(f"{where}: cannot be split into words ({why})") from None


def expanded(word: str, env: Mapping[str, str]) -> str:
    """A word with `$NAME`, `${NAME:-default}` and `$(NAME)` filled in; a name without a value is marked."""

    def fill(found: re.Match[str]) -> str:
        name = found["brace"] or found["kube"] or found["plain"]
        instead = found["instead"] or ""
        if name in env and not (instead.startswith(":") and env[name] == ""):
            return env[name]
        if re.match(r":?[-=]", instead):
            return expanded(instead.lstrip(":")[1:].strip("\"'"), env)
        return f"{UNKNOWN}{name}{UNKNOWN}"

    filled = _VARIABLE.sub(fill, word.replace("$$(", f"{DOLLAR}("))  # Kubernetes writes $( for it
    code = rf"(?<!{UNKNOWN})\$\(([^()]*)\)|`([^`]*)`"
    return re.sub(code, lambda m: f"{UNKNOWN}$({m[1] or m[2]}){UNKNOWN}", filled)


def unknown(word: str) -> list[str]:
    """The variables of a word that have no value here."""
    return word.split(UNKNOWN)[1::2]


def plain(word: str) -> str:
    """A word without marks, as people write it."""
    return (
        re.sub(f"{UNKNOWN}([^{UNKNOWN}]*){UNKNOWN}", r"$\1", word).replace(DOLLAR, "$").replace("$$(", "$(")
    )


class _Script:
    """Follows a script statement by statement, as a shell would, and executes nothing."""

    def __init__(self, where: str, env: dict[str, str]) -> None:
        self.where = where
        self.variables, self.exported = dict(env), dict(env)
        self.notes: list[str] = []
        self.depth = 0

    def read(self, text: str) -> Iterator[Command]:
        statement: list[tuple[str, bool]] = []
        for token, is_operator in _tokens(text, self.where):
            if is_operator and not _REDIRECTION.fullmatch(token):
                yield from self._statement(statement)
                statement = []
            else:
                statement.append((token, is_operator))
        yield from self._statement(statement)

    def _statement(self, tokens: Sequence[tuple[str, bool]]) -> Iterator[Command]:
        words = list(_words(tokens))
        while words and words[0] in _LEADS:
            self.depth += (words[0] in _OPENS) - (words[0] in _CLOSES)
            words = words[1:]
        if words and words[0] in ("export", "declare", "typeset", "readonly", "local"):
            self._assign([word for word in words[1:] if not word.startswith("-")], words[0] != "local")
            return
        front = 0
        while front < len(words) and _ASSIGNMENT.fullmatch(words[front]):
            front += 1
        if front == len(words):
            self._assign(words, False)
            return
        given = {m[1]: self._scalar(m[3]) for m in map(_ASSIGNMENT.fullmatch, words[:front]) if m}
        filled = [part for word in words[front:] for part in self._fill(word)]
        if not filled:
            return
        notes = list(self.notes)
        if self.depth > 0:
            notes.append("the command is in a condition or a loop. It is read as if the condition were true")
        variables, exported = {**self.variables, **given}, {**self.exported, **given}
        yield Command(words=tuple(filled), variables=variables, exported=exported, notes=tuple(notes))

    def _assign(self, words: Sequence[str], exports: bool) -> None:
        for word in words:
            found = _ASSIGNMENT.fullmatch(word)
            if found is None:
                if exports and word in self.variables:
                    self.exported[word] = self.variables[word]
                continue
            name, adds, value = found[1], found[2] == "+=", self._scalar(found[3])
            if self.depth > 0 and (adds or name in self.variables):
                self.notes.append(f"{name} is changed in a condition or a loop; this change is not read")
                continue
            old = self.variables.get(name, "") if adds else ""
            glue = _ARRAY if _ARRAY in value or _ARRAY in old else ""
            self.variables[name] = old + (glue if old else "") + value
            if exports or name in self.exported:
                self.exported[name] = self.variables[name].replace(_ARRAY, " ").strip()

    def _scalar(self, value: str) -> str:
        if value.startswith(_ARRAY):
            return _ARRAY + _ARRAY.join(part for item in value.split(_ARRAY)[1:] for part in self._fill(item))
        return expanded(value.replace(_BLANK, ""), self.variables)

    def _fill(self, word: str) -> list[str]:
        """The words that one word becomes: an array or an unquoted variable may give several."""
        filled = expanded(word, self.variables)
        if _ARRAY in filled:
            return [part for part in filled.split(_ARRAY) if part]
        if word != filled and re.fullmatch(r"\$\{?\w+(?:\[[@*]\])?(?::?-[^{}]*)?\}?", word):
            return filled.split() if not unknown(filled) else [filled]
        return [filled.replace(_BLANK, "")]


def _words(tokens: Iterable[tuple[str, bool]]) -> Iterator[str]:
    """The words of some tokens, without operators and without the files of redirections."""
    is_file = False
    for token, is_operator in tokens:
        if not is_operator and not is_file:
            yield token
        is_file = is_operator and _REDIRECTION.fullmatch(token) is not None


def _tokens(text: str, where: str) -> Iterator[tuple[str, bool]]:
    """Words before expansion (False) and operators (True)."""
    at = 0
    word: str | None = None
    documents = 0
    while at < len(text):
        if (piece := _piece(text, at, word, where)) is not None:
            word, at = (word or "") + piece[0], piece[1]
            continue
        if word is not None:
            yield word, False
            word = None
        if text.startswith("\\", at) or text[at] in " \t\r":
            at = re.compile(r"[ \t\r]+|\\\r?\n|\\$").match(text, at).end()  # type: ignore[union-attr]
            continue
        if text[at] == "#":
            at = len(text) if (end := text.find("\n", at)) < 0 else end
            continue
        operator = _OPERATOR.match(text, at)
        assert operator is not None
        at = operator.end()
        documents += operator[0] in ("<<", "<<-")
        yield operator[0], True
        if operator[0] == "\n" and documents:
            at, documents = _past_documents(text, at, documents), 0
    if word is not None:
        yield word, False


def _piece(text: str, at: int, word: str | None, where: str) -> tuple[str, int] | None:
    """The next part of a word and where it ends; None at a blank, a comment or an operator."""
    char = text[at]
    if char == "\\":
        if text[at + 1 : at + 2] in ("", "\n") or text[at + 1 : at + 3] == "\r\n":
            return None if word is None else (word[:0], at + (3 if text[at + 1 : at + 2] == "\r" else 2))
        return DOLLAR if text[at + 1] == "$" else text[at + 1], at + 2
    if char in "'\"":
        return _quoted(text, at, where)
    if char in "$`" and (found := _substitution(text, at)):
        return found, at + len(found)
    if char == "(" and word is not None and word.endswith("="):
        return _array(text, at, where)
    redirects = word is None and re.compile(r"\d[<>]").match(text, at)
    if char in " \t\r;|&\n()<>" or redirects or (char == "#" and word is None):
        return None
    return char, at + 1


def _quoted(text: str, at: int, where: str) -> tuple[str, int]:
    """The text between quotes, marked as one word. A `$` that the shell does not expand is replaced by
    DOLLAR.
    """
    mark = text[at]
    found = re.compile(r"'([^']*)'" if mark == "'" else r'"((?:[^"\\]|\\.)*)"', re.DOTALL).match(text, at)
    if found is None:
        raise BadInput(f"{where}: cannot be split into words (No closing quotation)")
    inside = found[1].replace("$", DOLLAR) if mark == "'" else found[1]
    if mark == '"':
        inside = inside.replace("\\\n", "").replace("\\$", DOLLAR)
        inside = re.sub(r'\\([\\"`])', r"\1", inside)
    array = re.fullmatch(r"\$\{?(?:\w+\[@\]|@)\}?", inside) is not None
    return (inside if array else _BLANK + inside), found.end()


def _substitution(text: str, at: int) -> str | None:
    """`$(…)`, `${…}` or backquotes from here on, whole."""
    if text[at] == "`":
        end = text.find("`", at + 1)
        return text[at : end + 1] if end > 0 else None
    pairs = {"$(": ")", "${": "}"}
    if (close := pairs.get(text[at : at + 2])) is None:
        return None
    depth = 0
    for position in range(at + 1, len(text)):
        depth += (text[position] == text[at + 1]) - (text[position] == close)
        if depth == 0:
            return text[at : position + 1]
    return None


def _array(text: str, at: int, where: str) -> tuple[str, int]:
    """The items of `( … )`, each after a mark, and where it ends."""
    depth, end = 0, at
    quote = ""
    for end in range(at, len(text)):
        char = text[end]
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        else:
            depth += (char == "(") - (char == ")")
        if depth == 0:
            break
    items = [token for token, is_operator in _tokens(text[at + 1 : end], where) if not is_operator]
    return "".join(f"{_ARRAY}{item.replace(_BLANK, '')}" for item in items) or _ARRAY, end + 1


def _past_documents(text: str, at: int, count: int) -> int:
    """The end of the here-documents whose marks (the words after `<<`) are in the line before `at`."""
    line = text[text.rfind("\n", 0, at - 1) + 1 : at]
    for mark in re.findall(r"<<-?\s*['\"]?(\w+)['\"]?", line)[:count]:
        found = re.compile(rf"^\s*{re.escape(mark)}\s*$", re.MULTILINE).search(text, at)
        at = found.end() if found else len(text)
    return at


def array(items: Sequence[str]) -> str:
    """The value of a variable that holds several words (`$@`)."""
    return "".join(f"{_ARRAY}{item}" for item in items) or _ARRAY


BATCH = (".bat", ".cmd")
SHELL = (".sh", ".bash", ".zsh", ".sbatch", ".slurm")
_BATCH_NAME = r"%(?P<batch>\w+)%|!(?P<late>\w+)!|%(?P<place>[*\d])|%(?P<lost>~?[\w:~,=+-]+)%?"
_PS_NAME = (
    r"\$(?i:env:)(?P<env>\w+)|\$\{(?i:env:)(?P<inside>\w+)\}|\$\{(?P<brace>\w+)\}|\$(?P<name>\w+)(?P<part>[.\[(]?)"
    r"|\$\((?P<code>[^()]*)\)|(?<!\S)@(?P<splat>\w+)"
)


def as_posix(text: str, suffix: str) -> str:
    """A script as a POSIX shell has it. It is for cmd.exe or PowerShell by its file's name, or by marks that
    no other shell has: `%NAME%` and a `^` that ends a line, `$env:NAME` and a backtick that ends a line.
    """
    batch = r"(?<!%)%[A-Za-z_]\w+%(?!%)|\s\^[ \t]*\r?\n"
    if suffix in BATCH or (suffix not in (*SHELL, ".ps1") and re.search(batch, text)):
        return of_batch(text)
    powershell = r"(?i)\$env:\w|\s`[ \t]*\r?\n"
    if suffix == ".ps1" or (suffix not in SHELL and re.search(powershell, text)):
        return of_powershell(text)
    return text


def of_batch(text: str) -> str:
    """A batch file as a shell script. Names of variables have capitals: case does not matter."""
    text = re.sub(r"\^[ \t]*\r?\n", " ", text)
    lines = re.sub(
        r"(?<![>^])&+(?=(?:[^\"\n]*\"[^\"\n]*\")*[^\"\n]*$)", "\n", text, flags=re.MULTILINE
    ).splitlines()
    return "\n".join(_batch_line(line.strip().lstrip("@").strip()) for line in lines)


def _batch_line(line: str) -> str:
    if re.match(r"(?i)(rem\b|::?|echo\b|setlocal|endlocal|pause|goto\b|exit\b|title\b|chcp\b)", line):
        return ""
    block = _block(line, r"(?i)(if|for)\b.*\($", r"(?i)\)\s*else\b.*\($", ")")
    if block:
        return block
    if found := re.match(r"(?i)if\s+not\s+defined\s+(\w+)\s+set\s+\"?\1=(.*?)\"?$", line):
        return f'export {found[1].upper()}="${{{found[1].upper()}:-{found[2]}}}"'
    if found := re.match(r"(?i)if\s+(?:.*?==\s*\S+|(?:not\s+)?(?:exist|defined)\s+\S+)\s+(.*)", line):
        return f"if :; then {_batch_line(found[1])}\nfi"
    if found := re.match(r"(?i)set\s+(/[ap])\s+\"?(\w+)=?", line):
        return f"{found[2].upper()}=$({found[2].upper()})"
    if found := re.match(r"(?i)set\s+(?:\"(\w+)=(.*)\"|(\w+)=(.*))", line):
        value = (found[2] or found[4] or "").replace('"', '\\"')
        return f"export {(found[1] or found[3]).upper()}=" + _filled(f'"{value}"', _BATCH_NAME, "", "$`")
    return _filled(re.sub(r"(?i)^call\s+", "", line), _BATCH_NAME, "^", "'$`;#")


def _block(line: str, opens: str, turns: str, closes: str) -> str:
    """A line that opens, turns or closes a block of lines; empty for any other."""
    if re.fullmatch(turns, line):
        return "else"
    if re.fullmatch(opens, line):
        return "if :; then"
    return "fi" if line == closes else ""


def _filled(line: str, names: str, escape: str, literal: str) -> str:
    """A line with its variables as `${NAME}`, its escapes as backslashes, and what only a shell reads quoted.
    A backslash is one unless it stands before a double quote.
    """
    made, quoted, at = "", False, 0
    while at < len(line):
        char, following = line[at], line[at + 1 : at + 2]
        found = re.compile(names).match(line, at)
        if char == "%" and following == "%":
            made, at = made + "%", at + 2
        elif found:
            made, at = made + _variable(found), found.end()
        elif escape and char == escape and following and (escape == "`" or not quoted):
            made, at = made + "\\" + following, at + 2
        elif char == "\\" and following == '"':
            made, at = made + '\\"', at + 2
        else:
            quoted ^= char == '"'
            special = char == "\\" or (char in literal and (char in "$`" or not quoted))
            made, at = made + "\\" * special + char, at + 1
    return made


def _variable(found: re.Match[str]) -> str:
    """A variable for the shell; `$( )`, which has no value there, if it is more than a name."""
    groups = {name: text for name, text in found.groupdict().items() if text}
    for kind in ("batch", "late", "env", "inside"):
        if kind in groups:
            return f"${{{groups[kind].upper()}}}"
    if "splat" in groups:
        return f"${{{groups['splat'].lower()}[@]}}"
    if groups.get("part"):
        return f"$({groups['name']}){groups['part']}"
    if name := groups.get("name") or groups.get("brace"):
        return f"${{{name.lower()}}}"
    if code := groups.get("code"):
        inner = re.fullmatch(_PS_NAME, code.strip())
        return _variable(inner) if inner and not inner["code"] else f"$({code})"
    return f"$({found[0].strip('%')})"


def of_powershell(text: str) -> str:
    """A PowerShell script as a shell script. Names of variables have small letters: case does not matter."""
    quoted = r"'(?:[^']|'')*'|\"(?:[^\"`]|`.)*\""
    comment = r"<#.*?#>|(?:^|(?<=\s))#[^\n]*"
    text = re.sub(rf"(?s)({quoted})|{comment}", lambda m: m[1] or "", text.replace("\r\n", "\n"))
    text = re.sub(r"[ \t]+`[ \t]*\n", " ", text)
    if found := re.search(r"(?is)^\s*param\s*\(", text, re.MULTILINE):
        end = _closing(text, found.end() - 1)
        given = _items(text[found.end() : end])
        text = text[: found.start()] + "\n".join(given) + text[end + 1 :]
    return "\n".join(_ps_line(line) for line in _split(text, "\n;"))


def _split(text: str, between: str) -> list[str]:
    """The parts of a text between some characters, outside of quotes and brackets."""
    found, at, begun = list[str](), 0, 0
    while at < len(text):
        if text[at] in "\"'":
            at = _quote_end(text, at)
        elif text[at] == "(":
            at = _closing(text, at)
        elif text[at] in between:
            found.append(text[begun:at])
            begun = at + 1
        at += 1
    return [*found, text[begun:]]


def _quote_end(text: str, at: int) -> int:
    """Where the quoted text that begins at a place ends; a backtick escapes in double quotes."""
    pattern = r"'(?:[^']|'')*'" if text[at] == "'" else r'"(?:[^"`]|`.)*"'
    found = re.compile(pattern, re.DOTALL).match(text, at)
    return found.end() - 1 if found else at


def _closing(text: str, at: int) -> int:
    """The place of the bracket that closes the one at a place; the text's end where none does."""
    depth = 0
    while at < len(text):
        if text[at] in "\"'":
            at = _quote_end(text, at)
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
        at += 1
    return at - 1


def _items(text: str) -> list[str]:
    """The items of a list, which stand between commas or line breaks."""
    return [each.strip() for each in _split(text, ",\n") if each.strip()]


def _ps_line(line: str) -> str:
    line = line.strip()
    opens = r"(?is)(if|else|for|foreach|while|try|do|function|switch)\b.*\{"
    if block := _block(line, opens, r"(?i)\}\s*\w.*\{", "}"):
        return block
    unset = r"(?is)if\s*\(\s*-not\s+\$(env:)?(\w+)\s*\)\s*\{\s*\$(?:env:)?\2\s*=\s*(.*?)\s*\}$"
    if found := re.match(unset, line):
        name = found[2].upper() if found[1] else found[2].lower()
        return f"export {name}=${{{name}:-{_ps_words([found[3]])}}}"
    if found := re.match(r"(?is)(?:\[[\w.\[\]]+\]\s*)*\$(env:)?(\w+)\s*(\+?=)\s*(.+)$", line):
        name = found[2].upper() if found[1] else found[2].lower()
        return f"{'export ' if found[1] else ''}{name}{found[3]}{_value(found[4].strip())}"
    if found := re.match(r"(?is)Start-Process\b(.*?)-ArgumentList\s+(.*?)(\s-[A-Z]\w+.*)?$", line):
        program = re.sub(r"(?i)-FilePath|-NoNewWindow|-Wait|-PassThru", "", found[1]).strip()
        given = _items(found[2].removeprefix("@(").removesuffix(")") if found[2][:1] == "@" else found[2])
        whole = re.sub(r"^(['\"])(.*)\1$", r"\2", given[0]) if len(given) == 1 else ""
        return f"{_ps_words([program])} {_filled(whole, _PS_NAME, '`', '') if whole else _ps_words(given)}"
    line = re.sub(r"(?<=\s)\(([^()]*)\)", lambda found: f"$({found[1].replace('$', '')})", line)
    return _ps_words([re.sub(r"\*>", ">", re.sub(r"^[&.]\s+", "", line))])


def _value(text: str) -> str:
    """The right side of an assignment: a text, a number, a list of them; anything else has no value here."""
    items = _items(text[2:-1]) if text.startswith("@(") and text.endswith(")") else _items(text)
    simple = r"(?s)'(?:[^']|'')*'|\"(?:[^\"`]|`.)*\"|[\d.]+|\$(?:env:)?\w+|\$\{\w+\}"
    if not all(re.fullmatch(simple, item) for item in items):
        return f"$({re.sub(r'[()`$]', '', text)[:60]})"
    return f"({_ps_words(items)})" if len(items) > 1 or text.startswith("@(") else _ps_words(items)


def _ps_words(parts: Sequence[str]) -> str:
    """Words of PowerShell as words of a shell: its quotes, its escapes, its variables, `@list`."""
    made = ""
    for piece in re.split(r"('(?:[^']|'')*')", " ".join(parts)):
        if piece.startswith("'") and piece.endswith("'") and len(piece) > 1:
            inside = piece[1:-1].replace("''", "'\\''")
            made += f"'{inside}'"
        else:
            made += _filled(piece, _PS_NAME, "`", "")
    return made
