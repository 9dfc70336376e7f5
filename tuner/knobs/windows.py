"""Start files of Windows as a POSIX shell would have them: batch files and PowerShell.

What has no like there (`%~dp0`, a pipeline of PowerShell) becomes a variable without a value, which is named
where it is needed. Nothing is executed.
"""

import re
from collections.abc import Sequence

BATCH = (".bat", ".cmd")
SHELL = (".sh", ".bash", ".zsh", ".sbatch", ".slurm")
_BATCH_NAME = r"%(?P<batch>\w+)%|!(?P<late>\w+)!|%(?P<place>[*\d])|%(?P<lost>~?[\w:~,=+-]+)%?"
_PS_NAME = (
    r"\$(?i:env:)(?P<env>\w+)|\$\{(?i:env:)(?P<inside>\w+)\}|\$\{(?P<brace>\w+)\}|\$(?P<name>\w+)(?P<part>[.\[(]?)"
    r"|\$\((?P<code>[^()]*)\)|(?<!\S)@(?P<splat>\w+)"
)


def is_batch(text: str, suffix: str) -> bool:
    """Whether a text is for cmd.exe: by its file's name, or by `%NAME%` and a `^` that ends a line."""
    marks = r"(?<!%)%[A-Za-z_]\w+%(?!%)|\s\^[ \t]*\r?\n"
    return suffix in BATCH or (suffix not in (*SHELL, ".ps1") and bool(re.search(marks, text)))


def is_powershell(text: str, suffix: str) -> bool:
    """Whether a text is for PowerShell: by its file's name, or by `$env:NAME` and a backtick that ends a
    line.
    """
    return suffix == ".ps1" or (suffix not in SHELL and bool(re.search(r"(?i)\$env:\w|\s`[ \t]*\r?\n", text)))


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
    """A variable for the shell; `$( )`, which has no value there, where it is more than a name."""
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
        return f"export {name}=${{{name}:-{_words([found[3]])}}}"
    if found := re.match(r"(?is)(?:\[[\w.\[\]]+\]\s*)*\$(env:)?(\w+)\s*(\+?=)\s*(.+)$", line):
        name = found[2].upper() if found[1] else found[2].lower()
        return f"{'export ' if found[1] else ''}{name}{found[3]}{_value(found[4].strip())}"
    if found := re.match(r"(?is)Start-Process\b(.*?)-ArgumentList\s+(.*?)(\s-[A-Z]\w+.*)?$", line):
        program = re.sub(r"(?i)-FilePath|-NoNewWindow|-Wait|-PassThru", "", found[1]).strip()
        given = _items(found[2].removeprefix("@(").removesuffix(")") if found[2][:1] == "@" else found[2])
        whole = re.sub(r"^(['\"])(.*)\1$", r"\2", given[0]) if len(given) == 1 else ""
        return f"{_words([program])} {_filled(whole, _PS_NAME, '`', '') if whole else _words(given)}"
    line = re.sub(r"(?<=\s)\(([^()]*)\)", lambda found: f"$({found[1].replace('$', '')})", line)
    return _words([re.sub(r"\*>", ">", re.sub(r"^[&.]\s+", "", line))])


def _value(text: str) -> str:
    """The right side of an assignment: a text, a number, a list of them; anything else has no value here."""
    items = _items(text[2:-1]) if text.startswith("@(") and text.endswith(")") else _items(text)
    simple = r"(?s)'(?:[^']|'')*'|\"(?:[^\"`]|`.)*\"|[\d.]+|\$(?:env:)?\w+|\$\{\w+\}"
    if not all(re.fullmatch(simple, item) for item in items):
        return f"$({re.sub(r'[()`$]', '', text)[:60]})"
    return f"({_words(items)})" if len(items) > 1 or text.startswith("@(") else _words(items)


def _words(parts: Sequence[str]) -> str:
    """Words of PowerShell as words of a shell: its quotes, its escapes, its variables, `@list`."""
    made = ""
    for piece in re.split(r"('(?:[^']|'')*')", " ".join(parts)):
        if piece.startswith("'") and piece.endswith("'") and len(piece) > 1:
            inside = piece[1:-1].replace("''", "'\\''")
            made += f"'{inside}'"
        else:
            made += _filled(piece, _PS_NAME, "`", "")
    return made
