"""Sources of rows: a file, a folder, or a dataset on the Hub, and the files of a split."""

import contextlib
import fnmatch
import hashlib
import itertools
import json
import os
import re
from functools import partial
from pathlib import Path, PurePosixPath

from finetune.data.reading.first_rows import counted, first_rows
from finetune.data.reading.packed import row_suffix
from finetune.data.reading.readers import PROSE, READERS, SAVE_AGAIN, _reader, read_dummy, read_saved_field
from finetune.data.reading.rows import RawDataset, collected
from finetune.errors import PlanError
from finetune.model_files.digest import check_blob
from finetune.model_files.files import local_path
from finetune.model_files.hub import (
    answer_in_time,
    blobs_of,
    check_ref,
    downloaded,
    endpoint,
    hub_cache,
    in_time,
    offline,
    well_formed,
)
from finetune.system.files import cache_folder, check_inside, check_listable, is_regular, replace
from finetune.system.json_files import JsonFileError, read_json
from finetune.system.threads import Pool
from finetune.system.untrusted import untrusted


def check_local(dataset: str | None, flag: str) -> None:
    """Raises PlanError unless `dataset` is a path, a dataset alias or a Hub name. Makes no network request."""
    if dataset is None or dataset in ("dummy", *DATASET_ALIASES) or local_path(dataset, f"{flag} {dataset}").exists():
        return
    if not HUB_NAME.fullmatch(dataset) or row_suffix(dataset) in READERS:
        find_files(dataset, "train", flag)


# alias -> (Hub name, split, number of rows if --dataset_samples is -1)
DATASET_ALIASES = {
    "alpaca": ("yahma/alpaca-cleaned", "train", -1),
    "alpaca_sample": ("yahma/alpaca-cleaned", "train", 512),
    "guanaco": ("timdettmers/openassistant-guanaco", "train", -1),
    "sql": ("knowrohit07/know_sql", "validation", -1),
    "orca_math": ("microsoft/orca-math-word-problems-200k", "train", -1),
}
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
}
PART_OF = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\..*)")  # of a file that is one of several
MOST_PARTS = 10_000
NOT_DATA = (
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "requirements.txt"),
    *("package.json", "package-lock.json", "tsconfig.json", "jsconfig.json", "composer.json", "manifest.json"),
)
CODE = frozenset(
    ".py .pyi .js .jsx .mjs .ts .tsx .vue .c .h .cc .cpp .hpp .cu .java .kt .scala .go .rs .rb .php .cs .fs .swift .m "
    ".r .jl .lua .pl .sh .bash .sql .hs .ex .exs .erl .clj .dart .zig .nim .ml".split()
)
# of tables whose folder has files of rows that were deleted: a file by which one knows it
TABLES = {"Delta Lake": "_delta_log/*.json", "Iceberg": "metadata/*.metadata.json", "Hudi": ".hoodie/*"}
MOST_FILES = 10_000  # of a folder that is looked through
MOST_NAMED = 3  # of what is not read
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w./-]+)?")


def read_rows(
    dataset: str,
    samples: int = -1,
    skip_bad_rows: int = 0,
    split: str = "train",
    flag: str = "--dataset",
    text_unit: str = "auto",
    only_first: bool = False,
) -> RawDataset:
    """Reads the first `samples` rows (-1: all) of a file, a folder, a Hub dataset or a dataset alias.

    `flag`: the flag that named it, for error messages. `text_unit`: see finetune/config.py. `only_first`: of
    the Hub the first rows, of one file. Raises PlanError naming file and line for anything unreadable.
    """
    if samples == 0:
        raise PlanError("--dataset_samples 0: leaves no rows. Use -1 for all of them.")
    files, description, word_samples = find_files(dataset, split, flag, text_unit, only_first)
    samples = word_samples if samples < 0 else samples
    about = None
    if only_first and not is_local(dataset):
        about = counted(files[0][1])[0]
        if about is not None and samples >= 0:
            about = min(about, samples)
    hasher = hashlib.sha256()
    every_row = (row for read, path, label in files for row in read(path, label, hasher))
    rows, sources, columns, skipped, notices = collected(every_row, skip_bad_rows, samples)
    if not rows:
        if len(files) == 1:
            name = files[0][2]
        else:
            name = dataset
        if skipped:
            raise PlanError(f"{skipped[0]}; no row of {name} can be read. Fix the rows.")
        raise PlanError(f"{name}: has no rows. Give a file with at least one row.")
    for _, path, label in files:
        if path and not os.path.getsize(path):  # as of a download that was cut
            notices.add(f"the file {PurePosixPath(label).name} is empty", label)
    return RawDataset(
        rows=rows,
        sources=sources,
        columns=tuple(columns),
        skipped=tuple(skipped),
        digest=hasher.hexdigest(),
        description=description,
        skip_bad_rows=skip_bad_rows,
        about=about,
        notices=notices,
    )


# ------ finding files


def find_files(
    dataset: str, split: str, flag: str, text_unit: str = "auto", only_first: bool = False
) -> tuple[list, str, int]:
    """([(reader, path, label)], description, default number of rows). `only_first`: see read_rows."""
    if dataset == "dummy":
        return [(read_dummy, None, "dummy")], "dummy: generated sums", -1
    if dataset in DATASET_ALIASES:
        name, split, samples = DATASET_ALIASES[dataset]
        files, description = hub_files(name, split, flag, only_first)
        return files, f"{dataset}: {description}", samples
    if "\0" in dataset or not dataset or len(dataset) > 4000:
        raise PlanError(f"{flag} {dataset[:80]!r}: not a path. Give a file, a folder or a Hub name.")
    path = local_path(dataset, f"{flag} {dataset}")
    if path.is_dir():
        files = folder_files(path, split, flag, text_unit)
        chosen = {file for _, file, _ in files}
        missing = _named(_other_parts(sorted(file.relative_to(path).as_posix() for file in chosen)), "not there")
        return files, f"{dataset} ({_count(files)}{_left_out(path, chosen)}{missing})", -1
    if path.is_file() and not os.access(path, os.R_OK):
        raise PlanError(f"{flag} {dataset}: permission denied. Change its permissions.")
    if path.is_file():
        return [(_reader(path.name, f"{flag} {dataset}", split, text_unit), path, dataset)], dataset, -1
    if path.exists():
        raise PlanError(f"{flag} {dataset}: not a regular file. Give a file, a folder or a Hub name.")
    if HUB_NAME.fullmatch(dataset) and row_suffix(path.name) not in READERS:
        files, description = hub_files(dataset, split, flag, only_first)
        return files, description, -1
    words = ", ".join((*DATASET_ALIASES, "dummy"))
    raise PlanError(f"{flag} {dataset}: no such file. Give a file, a folder, a Hub name (org/name), or one of {words}.")


def folder_files(folder: Path, split: str, flag: str, text_unit: str = "auto") -> list:
    """Data files of one split in a folder: written by `save_to_disk`, or with the split in their names."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_saved_field(folder / "dataset_dict.json", "splits", _are_names) or []
        if split not in splits:
            raise PlanError(f"{flag} {folder}: has no split {split!r}, it has {', '.join(splits)}.")
        return folder_files(folder / split, split, flag, text_unit)
    if (folder / "state.json").is_file():
        if read_saved_field(folder / "state.json", "_indices_data_files", bool):
            raise PlanError(
                f"{flag} {folder}: has an indices mapping, which is not supported. Call flatten_indices() and "
                "save it again."
            )
        entries = read_saved_field(folder / "state.json", "_data_files", _are_files)
        if not entries:
            raise PlanError(f"{folder / 'state.json'}: names no data files. {SAVE_AGAIN}")
        names = [entry["filename"] for entry in entries]
        outside = [name for name in names if PurePosixPath(name).name != name]
        if outside:
            raise PlanError(f"{folder / 'state.json'}: refers to {outside[0]!r} outside its folder. Do not use it.")
    elif (folder / "run_plan.json").is_file() or any(folder.glob("*.safetensors")):
        raise PlanError(f"{flag} {folder}: is the folder of a model or a run, not of data. Give the file of its rows.")
    else:
        _check_table(folder, f"{flag} {folder}")
        for inner in (".", "data", *SPLIT_WORDS):
            check_listable(folder / inner)
        patterns = "*", "data/*", *(f"{word}/*" for word in SPLIT_WORDS)
        found = [p for pattern in patterns for p in folder.glob(pattern) if _is_there(p)]
        _check_code(folder, found, f"{flag} {folder}")
        names = choose_files(sorted(p.relative_to(folder).as_posix() for p in found), split, f"{flag} {folder}")
    for name in names:
        if not (folder / name).is_file():
            raise PlanError(f"{folder / name}: no such file, although state.json lists it. Save the dataset again.")
    what = f"{flag} {folder}"
    return [(_reader(name, what, split, text_unit), folder / name, str(folder / name)) for name in names]


def _is_there(entry: Path) -> bool:
    """True for a file. Raises PlanError for what has a name of rows and is none, such as a link to nothing."""
    if row_suffix(entry.name) not in READERS or _is_about_data(entry.name):
        return entry.is_file()
    if entry.is_dir():  # as Spark writes a table
        raise PlanError(f"{entry}: is a folder with the name of a file of rows. Give it alone, or move its files here.")
    return is_regular(entry)


def _check_table(folder: Path, what: str) -> None:
    """Raises PlanError for a table whose log says which of its files count: the others hold what was deleted."""
    for name, pattern in TABLES.items():
        if any(folder.glob(pattern)):
            raise PlanError(
                f"{what}: is a table of {name}, whose log says which of its files count. Export its rows as .parquet "
                "or .jsonl."
            )


def _check_code(folder: Path, found: list[Path], what: str) -> None:
    """Raises PlanError for the folder of a program, whose settings and notes are no rows."""
    every = list(itertools.islice(folder.rglob("*"), MOST_FILES))
    code = sorted(p.relative_to(folder).as_posix() for p in every if p.suffix.lower() in CODE and p.is_file())
    data = [p for p in found if row_suffix(p.name) in READERS and not _is_about_data(p.name)]
    holds_rows = {row_suffix(p.name) for p in data} - {".json", *PROSE}
    if code and not holds_rows and len(code) >= len(data):
        raise PlanError(
            f"{what}: holds a program ({len(code)} files such as {code[0]}), which is not read as rows. Write the text "
            "of each file as a row of a .jsonl, or give the file of your rows."
        )


def _left_out(folder: Path, chosen: set[Path]) -> str:
    """Says which files of rows in a folder are not read: of other splits, in other folders, compressed."""
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return ""  # which name their files
    found = list(itertools.islice(folder.rglob("*"), MOST_FILES))
    closed = [p for p in found if p.is_dir() and not os.access(p, os.R_OK | os.X_OK)]
    names = sorted(p.relative_to(folder).as_posix() for p in found if p not in chosen and p.is_file())
    rows = [
        n for n in names if READERS.keys() & {s.lower() for s in PurePosixPath(n).suffixes} and not _is_about_data(n)
    ]
    denied = [f"{path.relative_to(folder).as_posix()}/" for path in sorted(closed)]
    return _named(rows, "not read") + _named(denied, "permission denied, not read")


def _named(names: list[str], what: str) -> str:
    """The first of the names behind what they are; empty without one."""
    more = ""
    if len(names) > MOST_NAMED:
        more = f" and {len(names) - MOST_NAMED} more"
    if names:
        return f"; {what}: {', '.join(names[:MOST_NAMED])}{more}"
    return ""


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _are_files(value: object) -> bool:
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        return False
    return _are_names([entry.get("filename") for entry in value])


def choose_files(names: list[str], split: str, what: str) -> list[str]:
    """The data files of one split among `names`, of every suffix. If no name contains a split, all are train."""
    data = [n for n in names if row_suffix(n) in READERS and not _is_about_data(n)]
    data = [n for n in data if not n.lower().endswith(".gz") or n[: -len(".gz")] not in data]
    if not data:
        raise PlanError(
            f"{what}: has no data files. Give a folder of {', '.join(READERS)} files, or one written by save_to_disk."
        )
    splits = {name: _split_of(name) for name in data}
    if not any(splits.values()):
        splits = dict.fromkeys(data, "train")
    chosen = [name for name in data if splits[name] == SPLIT_WORDS.get(split, split)]
    if not chosen:
        known = ", ".join(sorted({s for s in splits.values() if s}))
        raise PlanError(f"{what}: has no split {split!r}, it has {known}. Name the file of the split you mean.")
    folders = sorted({PurePosixPath(name).parent.as_posix() for name in chosen})
    if len(folders) > 1:
        raise PlanError(f"{what}: has several configurations, {', '.join(folders)}. Choose one: NAME:{folders[0]}.")
    return chosen


def is_local(name: str) -> bool:
    """True for a dataset that is read without a network."""
    if name in DATASET_ALIASES:
        return False
    try:
        return name == "dummy" or Path(name).expanduser().exists()
    except RuntimeError:  # a home that does not exist, which reading says
        return True


def hub_files(dataset: str, split: str, flag: str, only_first: bool = False) -> tuple[list, str]:
    """Files of one split of `org/name` or `org/name:config`, downloaded to the Hub cache; with `only_first` the first
    rows of the first, unless it is there.
    Honors HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
    """
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError

    name, _, config = dataset.partition(":")
    what = f"{flag} {dataset}"
    kind = "dataset"
    cache = hub_cache()
    answer_in_time()
    get = partial(huggingface_hub.hf_hub_download, name, endpoint=endpoint(), repo_type=kind, cache_dir=cache)
    try:
        check_ref(name, None, kind)
        if offline():
            found = huggingface_hub.snapshot_download(name, local_files_only=True, repo_type=kind, cache_dir=cache)
            folder = Path(found)
            commit = folder.name
            with untrusted(f"{what}: its dataset card cannot be read", "Give a local file."):
                chosen = _hub_choice(*_listing_of(name, folder), config, split, what)
            paths = [folder / n for n in chosen]
            _check_is_whole(chosen, folder, what)
        else:
            with well_formed(what):
                info = in_time(lambda: huggingface_hub.HfApi(endpoint=endpoint()).dataset_info(name))
                listed = [f.rfilename for f in info.siblings or ()]
                names = sorted(n for n in listed if ".." not in PurePosixPath("/", n).parts)
            with untrusted(f"{what}: its dataset card cannot be read", "Download it and give a local file."):
                card = {}
                if info.card_data:
                    card = info.card_data.to_dict()
                chosen = _hub_choice(names, card, config, split, what)
                commit = info.sha or "main"
                _keep_listing(name, commit, names, card)
            if only_first:
                cached = huggingface_hub.try_to_load_from_cache(name, chosen[0], cache, commit, kind)
                if isinstance(cached, str):
                    path = Path(cached)
                else:
                    path = first_rows(name, chosen[0], commit, len(chosen))
                return _first_of(dataset, split, flag, chosen, commit, path)
            blobs = blobs_of(name, kind)
            paths = [Path(downloaded(partial(get, filename=n), blobs, what)) for n in chosen]
            if info.sha:
                _check_commit(dict(zip(chosen, paths, strict=True)), info.sha, what)
    except GatedRepoError as error:
        raise PlanError(f"{what}: is gated. Accept its terms on the Hub and set HF_TOKEN.") from error
    except RepositoryNotFoundError as error:
        raise PlanError(f"{what}: neither a file nor a public Hub dataset. Check the name, or set HF_TOKEN.") from error
    except (HTTPError, OSError) as error:
        fact = " ".join(str(error).split())[:200]
        raise PlanError(f"{what}: no such file, and the Hub is unreachable ({fact}). Give a local file.") from error
    for path in paths:
        check_inside(path)
    with Pool(4) as pool:  # hashlib releases the GIL
        list(pool.map(check_blob, paths))
    files = [(_reader(n, what, split), p, f"{name}/{n}") for n, p in zip(chosen, paths, strict=True)]
    return files, f"{dataset} {split} at {commit[:12]} ({_count(files)})"


def _listing_file(name: str, commit: str) -> Path:
    key = hashlib.sha256(f"{name} {commit}".encode()).hexdigest()[:24]
    return cache_folder("listed") / f"{key}.json"


def _keep_listing(name: str, commit: str, names: list[str], card: dict) -> None:
    """Keeps the files of a commit, so that without a network the same of them are a split's. A cache that can't be
    written only loses that.
    """
    content = json.dumps({"names": names, "card": {"configs": card.get("configs")}}, default=str)
    with contextlib.suppress(OSError):
        file = _listing_file(name, commit)
        file.parent.mkdir(parents=True, exist_ok=True)
        with replace(file) as out:
            out.write(content.encode())


def _listing_of(name: str, folder: Path) -> tuple[list[str], dict]:
    """(files of a snapshot's commit, its card), as they were listed over the network; without a list, as by another
    program's download, those in the folder and the other parts of their numbers.
    """
    import huggingface_hub

    try:
        kept = read_json(_listing_file(name, folder.name), {"names": [str], "card": object})
        return kept["names"], kept["card"]
    except (FileNotFoundError, JsonFileError):
        pass
    names = [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()]
    names = sorted(names + _other_parts(names))
    if "README.md" not in names:
        return names, {}
    return names, huggingface_hub.DatasetCard.load(folder / "README.md").data.to_dict()


def _check_is_whole(chosen: list[str], folder: Path, what: str) -> None:
    """Raises PlanError for a snapshot that lacks files of a split."""
    lacks = [name for name in chosen if not (folder / name).is_file()]
    if lacks:
        others = ""
        if len(lacks) > 1:
            others = f" and {len(lacks) - 1} more"
        raise PlanError(
            f"{what}: its download was not completed: {lacks[0]}{others} of its files are not in {folder}. Start once "
            "without HF_HUB_OFFLINE."
        )


def _other_parts(names: list[str]) -> list[str]:
    """The files that files called 1 of several name, and that are not among these."""
    there = set(names)
    families = dict.fromkeys(part.group(1, 3, 4) for name in names if (part := PART_OF.fullmatch(name)))
    found = []
    for before, total, after in families:
        parts = [f"{before}{k:05d}-of-{total}{after}" for k in range(min(int(total), MOST_PARTS))]
        found += [part for part in parts if part not in there]
    return found


def _check_commit(paths: dict[str, Path], commit: str, what: str) -> None:
    """Raises PlanError unless each file, {its name: where it is}, is of the commit whose files the Hub had listed.
    Asking for the commit by its name would leave no `main` in the cache for a later start without a network.
    """
    given = {path.parents[name.count("/")].name for name, path in paths.items()}
    if others := sorted(given - {commit}):
        fact = f"{endpoint()} lists the files of commit {commit[:12]} and gives those of {others[0][:12]}"
        raise PlanError(f"{what}: {fact}. Try again.")


def _first_of(dataset: str, split: str, flag: str, chosen: list, commit: str, path: Path) -> tuple[list, str]:
    """The result of hub_files for the first rows of a split's first file."""
    name = dataset.partition(":")[0]
    what = f"{flag} {dataset}"
    about, moved = counted(path)
    size = "all"
    if about:
        size = f"about {about:,}"
    others = ""
    if len(chosen) > 1:
        others = f", the first of {len(chosen)} files"
    read = ""
    if moved:
        read = f", {moved / 2**10:,.0f} KiB"
    said = f"{dataset} {split} at {commit[:12]} ({chosen[0]}{others}): its first rows of {size}{read}"
    return [(_reader(chosen[0], what, split), path, f"{name}/{chosen[0]}")], said


def _hub_choice(names: list[str], card: dict, config: str, split: str, what: str) -> list[str]:
    """File names of one split: from the dataset card's `configs` if it has them, else inferred from file names."""
    configs = {c.get("config_name", "default"): c for c in card.get("configs") or () if c.get("data_files")}
    if configs and not config:
        marked = [n for n, c in configs.items() if c.get("default") or n == "default"] or list(configs)
        if len(marked) > 1:
            raise PlanError(f"{what}: has several configurations, {', '.join(configs)}. Choose one: NAME:{marked[0]}.")
        config = marked[0]
    if config in configs:
        patterns = configs[config]["data_files"]
        if isinstance(patterns, list) and all(isinstance(p, dict) for p in patterns):
            splits = {p["split"]: p["path"] for p in patterns}
            if split not in splits:
                raise PlanError(f"{what}: has no split {split!r}, it has {', '.join(splits)}.")
            patterns = splits[split]
        if isinstance(patterns, str):
            patterns = [patterns]
        chosen = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
        if not chosen:
            raise PlanError(
                f"{what}: its card lists no existing file for split {split!r}. Download it and give a local file."
            )
        return chosen
    if config:
        names = [n for n in names if n.startswith(f"{config}/")]
        if not names:
            raise PlanError(
                f"{what}: has no configuration {config!r}. It has {', '.join(configs) or 'no configurations'}."
            )
    return choose_files(_one_suffix([n for n in names if not n.lower().endswith(PROSE)]), split, what)


def _is_about_data(name: str) -> bool:
    """True for files that come with data: its description, a licence, a list of requirements."""
    path = PurePosixPath(name)
    if path.name.startswith(".") or path.name in NOT_DATA:
        return True
    about = ("README", "LICENSE", "LICENCE", "CHANGELOG", "NOTICE")
    return path.suffix.lower() in PROSE and path.stem.upper().startswith(about)


def _one_suffix(names: list[str]) -> list[str]:
    """The names of the first suffix of READERS that there is: a Hub repository may hold its rows in several."""
    groups = ([n for n in names if row_suffix(n) == suffix] for suffix in READERS)
    return next((group for group in groups if not all(map(_is_about_data, group))), names)


def _split_of(name: str) -> str | None:
    """The split in a file's name or in its folder's name; None if neither contains one."""
    for part in reversed(PurePosixPath(name).with_suffix("").parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return None


def _count(files: list) -> str:
    if len(files) == 1:
        return files[0][2].rsplit("/", 1)[-1]
    return f"{len(files)} files"
