"""docs/troubleshooting.md quotes messages that exist, and has every message that does not itself say what to do.

A message says what to do by `expected …`, or by a clause that begins with a verb: `…; use …`, `…. Remove …`. The page
may quote such a message too, where its cause needs explaining; an entry may not send the reader back to the message.
Messages are read from the source: the text that a `UserError` or a warning is made with, `…` for what it fills in.
"""

import ast
import functools
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import fullshard.config.errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fullshard"
PAGE = ROOT / "docs" / "troubleshooting.md"
ERRORS = {
    name
    for name, kind in vars(fullshard.config.errors).items()
    if isinstance(kind, type) and issubclass(kind, fullshard.config.errors.UserError)
}
FILLED_IN = "\0"
LEAST = 10  # letters of a message that an entry must quote
MOST = 16  # messages that one entry may stand for: that of the shared "expected …, got …" of all options

VERBS = """
    add annotate ask build call cast change check choose close copy correct convert delete drop
    export free freeze give install keep leave let load lower make mark merge move name open pass
    prepare print put quantize raise read remove rename resume return run save see select set shard
    shorten start take train try turn unset update upgrade use wrap write
"""
"""What a message asks for."""
ADVICE = re.compile(rf"\bexpected\b|(?:^|[;.:(] |,? or )(?:{'|'.join(VERBS.split())}) \S", re.IGNORECASE)

PASSED_ON = {
    "distributed/watchdog/rank_state.py": "a failure found by investigate.py, threads.py or diagnosis.py",
    "distributed/watchdog/messages.py": "what heartbeat.py reports about a rank",
    "distributed/watchdog/investigate.py": "where each rank is, as diagnosis.py lists it",
    "distributed/rank_logging.py": "what `warn_once` is given",
    "data/row_formats.py": "what was wrong with a row, once more with the row",
    "sft/cli_args.py": "what SFTConfig says of its own fields",
    "weights/unpacked.py": "what quant/stored_files.py says of a part that does not fit",
    "weights/fill.py": "what weights/match.py says of files that do not fit",
    "checkpoint/manager.py": "what failed in the background",
    "ranks.py": "what another rank raised",
    "checkpoint/optimizer_state.py": "every difference between two lists of groups, as `_groups_differ` lists them",
    "checkpoint/objects.py": "what dcp_planner.py says of one tensor",
    "checkpoint/save_restore.py": "what torch.distributed.checkpoint raised",
}
"""Files with an error whose text is wholly that of another one."""


@dataclass(frozen=True)
class Message:
    """One text that the package gives to a user."""

    kind: str
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"fullshard/{self.file}:{self.line} {self.kind}: {self.text.replace(FILLED_IN, '…')}"


class Texts:
    """The texts that an expression may stand for: literals, choices, variables of its function, local functions."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.around: dict[ast.AST, ast.FunctionDef] = {}
        for function in self.functions.values():  # inner functions come later and win
            for node in ast.walk(function):
                self.around[node] = function

    def of(self, node: ast.expr, depth: int = 0) -> list[str]:
        if depth > 4:
            return []
        deeper = functools.partial(self.of, depth=depth + 1)
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr():
                return ["".join(parts) for parts in itertools.product(*(self._part(v, depth) for v in node.values))]
            case ast.BinOp(op=ast.Add()):
                return [a + b for a in deeper(node.left) or [FILLED_IN] for b in deeper(node.right) or [FILLED_IN]]
            case ast.IfExp():
                return deeper(node.body) + deeper(node.orelse)
            case ast.BoolOp():
                return [text for value in node.values for text in deeper(value)]
            case ast.Call(func=ast.Name(id=name)) if name in self.functions:
                returned = [n.value for n in ast.walk(self.functions[name]) if isinstance(n, ast.Return) and n.value]
                return [text for value in returned for text in deeper(value)]
            case ast.Name(id=name) if node in self.around:
                return [text for value in _values(self.around[node], name) for text in deeper(value)]
        return []

    def _part(self, node: ast.expr, depth: int) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        assert isinstance(node, ast.FormattedValue)
        chosen = self.of(node.value, depth + 1) if isinstance(node.value, ast.Name) else []
        return [text for text in chosen if text] or [FILLED_IN]


def _values(function: ast.FunctionDef, name: str) -> list[ast.expr]:
    """What a variable is set to in a function: by assignment, or row by row in a loop over a literal table."""
    found: list[ast.expr] = []
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=target)]) if target == name:
                found.append(node.value)
            case ast.For(target=ast.Tuple(elts=columns), iter=ast.Tuple(elts=rows)):
                for i, column in enumerate(columns):
                    if isinstance(column, ast.Name) and column.id == name:
                        found += [row.elts[i] for row in rows if isinstance(row, ast.Tuple)]
    return found


def _called(node: ast.Call) -> str:
    match node.func:
        case ast.Attribute(attr="append", value=ast.Attribute(attr="problems") | ast.Name(id="problems")):
            return "problem"  # a line of an error that lists everything that does not fit
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


@functools.cache
def messages() -> tuple[list[Message], list[Message]]:
    """Messages of the package, and places whose text only a run can tell."""
    told, untold = [], []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        texts, file = Texts(tree), str(path.relative_to(PACKAGE))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            kind = _called(node)
            if kind not in ERRORS and kind not in ("warn_once", "warning", "problem", "BadRow"):
                continue
            found = texts.of(node.args[-1] if kind == "warn_once" else node.args[0])
            if kind == "warning":
                found = [re.sub("%[sdgr]", FILLED_IN, text) for text in found]
            told += [Message(kind, file, node.lineno, text) for text in found if re.search("[a-z]{2}", text)]
            if not found:
                untold.append(Message(kind, file, node.lineno, ast.unparse(node)))
    return told, untold


@functools.cache
def strings() -> list[str]:
    """Every text in the source, for quotes of what is put together on the way."""
    found = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        texts = Texts(tree)
        alone = {n.value for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
        said = [n for n in ast.walk(tree) if isinstance(n, ast.Constant | ast.JoinedStr) and n not in alone]
        found += [text for node in said for text in texts.of(node)]
    return found


@functools.cache
def quotes() -> list[str]:
    """The messages quoted in the first column of the page's tables of messages."""
    found, reading = [], False
    for line in PAGE.read_text().splitlines():
        if line.startswith("| the message |"):
            reading = True
        elif not line.startswith("|"):
            reading = False
        elif reading and not line.startswith("|---"):
            first = re.split(r"(?<!\\)\|", line)[1]
            found += [quoted.replace("\\|", "|") for _, quoted in re.findall(r"(`+)(.+?)\1(?!`)", first)]
    return found


@functools.cache
def fits(quote: str) -> re.Pattern[str]:
    """What a quoted message may look like in the source: its words, with anything for `…`."""
    words = [re.escape(part).replace(r"\ ", r"\s+") for part in quote.strip("… ").split("…")]
    return re.compile(r".*".join(words), re.DOTALL)


OTHERS = {
    "CUDA out of memory",
    "modified by an inplace operation",
    "out of bounds for storage of size 0",
    "got mixed torch.Tensor and DTensor",
    "Expected more than 1 value per channel when training",
}
"""Quoted, though another library says it."""


def test_the_page_quotes_messages_that_exist():
    every = list(dict.fromkeys([message.text for message in messages()[0]] + strings()))
    gone = [q for q in quotes() if q not in OTHERS and not any(map(fits(q).search, every))]
    assert not gone, "docs/troubleshooting.md quotes what the source does not say (any more):\n" + "\n".join(gone)


def test_a_quote_is_long_enough_to_tell_messages_apart():
    short = [q for q in quotes() if len(q.replace("…", "").strip()) < LEAST]
    assert not short, f"quotes with fewer than {LEAST} letters would fit almost anything: {short}"
    every = {message.text for message in messages()[0]}
    wide = [q for q in quotes() if sum(bool(fits(q).search(text)) for text in every) > MOST]
    assert not wide, f"quotes that fit more than {MOST} messages say nothing of any: {wide}"


def says_what_to_do(text: str) -> bool:
    """Whether a message names what was expected, or has a clause that begins with one of `VERBS`."""
    return bool(ADVICE.search(text.replace("\n", " ")))


def test_every_message_says_what_to_do_or_has_an_entry():
    silent = [m for m in messages()[0] if not says_what_to_do(m.text)]
    lacking = [m for m in silent if not any(fits(quote).search(m.text) for quote in quotes())]
    assert len(silent) > 300, "too few for a test that can fail"
    assert not lacking, (
        f"{len(lacking)} message(s) that do not say what to do and have no entry. Say it in the message, or add a row "
        "to docs/troubleshooting.md that quotes a part (`…` for what is filled in), why it comes and what to do:\n"
        + "\n".join(map(str, lacking))
    )


@pytest.mark.parametrize(
    ("text", "does"),
    [
        (f"port {FILLED_IN} is in use; take another", True),
        (f"{FILLED_IN}: expected a number", True),
        ("the two are both on. Leave one of them out.", True),
        ("give processing_class=", True),
        (f"port {FILLED_IN} is in use", False),
        (f"the name {FILLED_IN} is set twice; the used value is the first", False),
        ("unexpected keys", False),
    ],
)
def test_which_messages_say_what_to_do(text, does):
    assert says_what_to_do(text) == does


def test_no_entry_sends_the_reader_back_to_the_message():
    empty = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 3 and cells[0].startswith("`"):
            todo = cells[2].removesuffix(".")
            if not todo or re.match(r"(?:as|what) (?:it|the message) says|(?:one|some) of (?:these|those)$", todo):
                empty.append(line)
    assert not empty, "say what to do, or leave the row out:\n" + "\n".join(empty)


def test_texts_that_only_a_run_can_tell_are_those_known():
    unknown = [m for m in messages()[1] if m.file not in PASSED_ON]
    assert not unknown, (
        "the text of these cannot be read from the source; write it where it is raised, in a variable of that "
        "function, or in a function of the same file:\n" + "\n".join(map(str, unknown))
    )


def test_every_kind_of_error_is_on_the_page():
    quoted = {m.kind for m in messages()[0] if any(fits(quote).search(m.text) for quote in quotes())}
    raised = {m.kind for m in messages()[0]}
    assert raised - quoted == set()
    assert raised >= {"ConfigError", "DataError", "WeightsError", "CheckpointError", "TrainingError", "FSDPError"}


@pytest.mark.parametrize(
    ("quote", "text", "same"),
    [
        ("port … is in use", f"port {FILLED_IN} is in use; take another", True),
        ("… is in use", f"port {FILLED_IN} is in use; take another", True),
        ("port … is in use", f"port {FILLED_IN} may not be used", False),
        ("two words", "two\nwords", True),
    ],
)
def test_how_quotes_and_messages_are_compared(quote, text, same):
    assert bool(fits(quote).search(text)) == same
