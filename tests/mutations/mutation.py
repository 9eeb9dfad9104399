"""A mutation: a small break of what one promise of the guides says, which a test of that promise must notice."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """`old` occurs once in `file` and becomes `new`. `promise`: an id of the checklist; `what`: the break in words."""

    promise: str
    what: str
    file: str
    old: str
    new: str

    def applied_to(self, text: str) -> str:
        """The file's text with the break. Raises ValueError if the text to replace is not there once."""
        if text.count(self.old) != 1 or self.old == self.new:
            raise ValueError(f"{self.promise}, {self.what}: {self.file} has {text.count(self.old)} times {self.old!r}")
        return text.replace(self.old, self.new)

    def apply(self, root: Path) -> str:
        """Breaks the file under `root`; its text before."""
        file = root / self.file
        before = file.read_text(encoding="utf-8")
        _write(file, self.applied_to(before))
        return before

    def undo(self, root: Path, before: str) -> None:
        _write(root / self.file, before)


def _write(file: Path, text: str) -> None:
    """Bytecode is known by size and second of its source, which a quick change may leave as they were."""
    file.write_text(text, encoding="utf-8")
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
