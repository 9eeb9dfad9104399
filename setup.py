"""Files of the wheel: the scripts and packages, and within finetune/ the rows and recipes that they read."""

from pathlib import Path

from setuptools import find_packages, setup

SCRIPTS = ("train", "generate", "score", "export", "expand", "report", "pretrain")
FACES = ("backend_manager", "quantization_wrapper", "mps_fsdp_wrapper")
# Packages of data: a folder of the repository under its name in the wheel (finetune/shipped.py).
FOLDERS = {"finetune.examples": "examples", "finetune.recipes": "config", "finetune.recipes.arch": "config/arch"}

setup(
    py_modules=[name for name in (*SCRIPTS, *FACES) if Path(f"{name}.py").is_file()],
    packages=[*find_packages(include=["finetune", "finetune.*", "recursive", "recursive.*", "dataset"]), *FOLDERS],
    package_dir=FOLDERS,
    package_data={
        "finetune": ["py.typed"],
        "finetune.names": ["*.yaml"],
        "finetune.run": ["*.jinja", "*.css"],
        **dict.fromkeys(FOLDERS, ["*.jsonl", "*.json", "*.yaml"]),
    },
    include_package_data=False,
)
