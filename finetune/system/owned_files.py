"""Files of a folder that a run, or a builder of data sets, wrote: no other file is ever replaced or removed.

A list in the folder names them. A name is entered before its file is written, so a kill leaves no file without an
owner. Temporary names carry the list's id, by which what a kill left is known.
"""

import contextlib
import filecmp
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath

from finetune.errors import PlanError
from finetune.system.files import WRITING, replace, sync_folder
from finetune.system.json_files import JsonFileError, read_json

LIST = ".written.json"
SCHEMA = {"id": str, "files": [str], "sha256": str}
KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a link", stat.S_IFIFO: "a pipe"}


class OwnedFiles:
    """The files of `folder` that its list names; without a list, `adopted`: those of a run made before there were any.

    Names are relative to `folder`. `said` begins every PlanError: the flag and the folder. `id`: of temporary names.
    """

    def __init__(self, folder: Path, said: str, adopted: Iterable[str] = ()):
        found = read_list(folder)
        self.folder = folder
        self.said = said
        # Without a list always the same id: a kill while the first is written leaves a temporary name, known by it.
        place = hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()
        self.id, self.names = found or (place[:8], set(adopted))
        self.listed: set[str] = set()  # of the names those that the list has
        if found:
            self.listed |= found[1]
        if self.names:
            self.names.add(LIST)

    def check(self, names: Iterable[str]) -> None:
        """Raises PlanError for the first of these that exists and may not be replaced."""
        for name in (LIST, *names):
            kind = kind_of(self.folder / name)
            if kind and (kind != "a file" or name not in self.names):
                if kind == "a file":
                    fact = "not of a run"
                else:
                    fact = f"{kind} and never replaced"
                raise PlanError(f"{self.said}: holds {name}, which is {fact}. Give another folder, or move it away.")

    def claim(self, *names: str) -> None:
        """Enters these names into the list, before their files are written. Raises PlanError as `check` does."""
        self.check(names)
        if not self.listed.issuperset((LIST, *names)) or kind_of(self.folder / LIST) is None:
            self.names |= {LIST, *names}
            write_list(self.folder, self.names, self.id)
            self.listed = set(self.names)

    @contextlib.contextmanager
    def staged(self, subfolder: str = ".") -> Iterator[Path]:
        """A folder to write files to, which are put into `subfolder` at the end, each atomically.

        A file that is there already, byte for byte, stays.
        """
        target = self.folder / subfolder
        beside = target / self.temporary("staged")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        try:
            yield beside
            moved = [f.name for f in sorted(beside.iterdir()) if not self._is_there(f, target / f.name)]
            self.claim(*(str(PurePath(subfolder, name)) for name in moved))
            for name in moved:
                (beside / name).replace(target / name)
            sync_folder(target)
        finally:
            shutil.rmtree(beside, ignore_errors=True)

    @staticmethod
    def _is_there(file: Path, present: Path) -> bool:
        return kind_of(present) == "a file" and filecmp.cmp(file, present, shallow=False)

    def temporary(self, name: str) -> str:
        """Name of a file or folder until it is complete."""
        return f".tmp-{self.id}-{name}"

    def leftovers(self, subfolders: Iterable[str]) -> Iterator[Path]:
        """Leftovers of killed processes under temporary names of this list."""
        for folder in (self.folder / name for name in subfolders):
            for mark in (".tmp-", ".trash-", WRITING):
                yield from folder.glob(f"{mark}{self.id}-*")

    def clean(self, subfolders: Iterable[str]) -> None:
        """Removes the leftovers."""
        for leftover in self.leftovers(subfolders):
            remove_tree(leftover)

    def remove(self, last: str) -> None:
        """Deletes the files of the list, `last` last, and the subfolders that are then empty."""
        for name in sorted(self.names, key=lambda name: (name == LIST, name == last, name)):
            if kind_of(self.folder / name) == "a file":
                (self.folder / name).unlink()
        for subfolder in {str(PurePath(name).parent) for name in self.names} - {"."}:
            with contextlib.suppress(OSError):  # it holds someone else's files, or is a link
                (self.folder / subfolder).rmdir()

    def remove_list_of_nothing(self) -> None:
        """Deletes the list if none of its files was written."""
        if LIST in self.names and not any(kind_of(self.folder / name) for name in self.names - {LIST}):
            (self.folder / LIST).unlink(missing_ok=True)


def kind_of(path: Path) -> str | None:
    """Kind of the entry at `path`, links not followed; None if there is none."""
    try:
        return KINDS.get(stat.S_IFMT(os.lstat(path).st_mode), "a device or socket")
    except (FileNotFoundError, NotADirectoryError):
        return None


def remove_tree(path: Path) -> None:
    """Deletes a file, a link or a folder; what cannot be deleted stays."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
    shutil.rmtree(path, ignore_errors=True)


def read_list(folder: Path) -> tuple[str, set[str]] | None:
    """(id, names) of the list in `folder`; None if there is none, or if it is not as it was written."""
    try:
        content = read_json(folder / LIST, SCHEMA)
    except (JsonFileError, FileNotFoundError):
        return None
    names = [PurePath(name) for name in content["files"]]
    inside = all(name.parts and not name.is_absolute() and ".." not in name.parts for name in names)
    if not inside or not re.fullmatch("[0-9a-f]{8}", content["id"]) or content.pop("sha256") != _digest(content):
        return None
    return content["id"], set(content["files"])


def write_list(folder: Path, names: Iterable[str], list_id: str) -> None:
    content = {"id": list_id, "files": sorted(names)}
    with replace(folder / LIST, durable=True, mark=list_id) as file:
        file.write(json.dumps(content | {"sha256": _digest(content)}, indent=1).encode())


def files_below(folder: Path) -> Iterator[str]:
    """Names of everything in `folder` and its subfolders but these, relative to it. Links are not followed."""
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        if folders or files or parent == str(folder):
            empty = []
        else:
            empty = ["."]
        for name in (*files, *links, *empty):
            yield os.path.normpath(os.path.relpath(os.path.join(parent, name), folder))


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps({k: content[k] for k in ("id", "files")}).encode()).hexdigest()
