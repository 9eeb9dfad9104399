"""mkdocs' hooks, named in mkdocs.yml: files of the repository outside docs/ that pages link to become pages too.

A Markdown file becomes a page, a folder a list of its files, and any other file a page that shows it.
"""

import html
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
INFO = re.compile(r"^```(\S*) ?(.*)")
LANGUAGES = {".sh": "bash", ".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json"}


def on_config(config):
    """Anchors as GitHub makes them, so that a link leads to the same heading in both places."""
    config.mdx_configs["toc"]["slugify"] = anchor
    return config


def anchor(heading: str, separator: str = "-") -> str:
    """`--mlx_config` is `--mlx_config`; `CPU offload` is `cpu-offload`."""
    return re.sub(r"[^\w\- ]", "", html.unescape(heading).lower()).strip().replace(" ", separator)


def on_files(files, config):
    """Adds what pages link to outside docs/, and what that links to in turn."""
    found, waiting = {}, [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for path in linked(page):
            if path.exists() and path not in found and not path.is_relative_to(ROOT / "docs"):
                text, level = content_of(path), InclusionLevel.NOT_IN_NAV
                found[path] = File.generated(config, uri_of(path), content=text, inclusion=level)
                waiting.append(path)
    for file in found.values():
        files.append(file)
    return files


def on_page_markdown(markdown, page, config, files):
    """Links by the places of the files in the repository, as links of the site."""
    source = place_of(page.file.src_uri)

    def of_site(link: re.Match) -> str:
        if re.match(r"\w+:", link[2]):
            return link[0]
        target = uri_of((source.parent / link[2]).resolve())
        return f"{link[1]}{posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or '.')}{link[3] or ''})"

    kept = [INFO.sub(of_block, block, count=1) for block in FENCE.findall(markdown)]
    parts = [LINK.sub(of_site, part) for part in FENCE.split(markdown)]
    return "".join(part + code for part, code in zip(parts, [*kept, ""], strict=True))


def of_block(info: re.Match) -> str:
    """The first line of a block: its language, and as a title the file that it is."""
    return f"```{info[1]}" + (f' title="{info[2]}"' if "." in info[2] else "")


def linked(page: Path) -> list[Path]:
    """The files of the repository that a Markdown file links to; those of a folder."""
    if page.suffix != ".md":
        return sorted(page.iterdir()) if page.is_dir() else []
    links = LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    return [(page.parent / target).resolve() for _, target, _ in links if not re.match(r"\w+:", target)]


def uri_of(path: Path) -> str:
    """A file of the repository in the site: docs/ is its root, everything else lies below repository/."""
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"repository/{name}" if path.suffix == ".md" else f"repository/{name}.md"


def place_of(uri: str) -> Path:
    """The inverse of uri_of."""
    if not uri.startswith("repository/"):
        return ROOT / "docs" / uri
    path = ROOT / uri.removeprefix("repository/")
    return path if path.is_file() else path.with_suffix("")


def content_of(path: Path) -> str:
    """Markdown as it is; a folder as a list of links; any other file as a block of code."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    title = f"# {path.relative_to(ROOT)}\n\n"
    if path.is_dir():
        return title + "".join(f"- [{file.name}]({path.name}/{file.name})\n" for file in sorted(path.iterdir()))
    return f"{title}````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text(encoding='utf-8')}\n````\n"
