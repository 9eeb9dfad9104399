"""Download of a Hub adapter into a folder, the form that every reader of adapters takes."""

from finetune.model_files.demo_model import DEMO_MODEL
from finetune.model_files.files import local_path
from finetune.model_files.hub import hub_folder, looks_like_hub_id


def fetched(name: str, flag: str = "--checkpoint", fetch: bool = True) -> str:
    """The folder of a Hub adapter, downloaded unless it is cached; any other name, a model of the Hub among them, as it
    is. `fetch` False makes no network request. Raises PlanError.
    """
    if not looks_like_hub_id(name) or "/" not in name or name == DEMO_MODEL:
        return name
    if local_path(name, f"{flag} {name}").exists():
        return name
    folder = hub_folder(name, None, f"{flag} {name}", cached_only=not fetch)
    if folder and (folder / "adapter_config.json").is_file():
        return str(folder)
    return name
