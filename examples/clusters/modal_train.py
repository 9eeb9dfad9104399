"""Trains on a GPU machine of Modal (https://modal.com): one function call, with one rank per GPU.

pip install modal; modal setup
modal run --detach examples/clusters/modal_train.py --flags "--model_name Qwen/Qwen3-0.6B --dataset examples/chat.jsonl"
modal volume get finetune outputs/modal .

A call that is preempted, fails or runs out of time is started again by Modal, and the run resumes from the volume.
"""

import shlex
import subprocess
from pathlib import Path

import modal

ROOT = Path(__file__).resolve().parents[2] if modal.is_local() else Path("/root/finetune")
GPU = "H100:8"
HOURS = 12

image = (
    modal.Image.debian_slim(python_version="3.12")
    .pip_install_from_requirements(str(ROOT / "requirements.txt"))
    .env({"HF_HOME": "/shared/huggingface"})
    .add_local_dir(ROOT, "/root/finetune", ignore=[".git", ".venv", "outputs", "**/__pycache__"])
)
app = modal.App("finetune", image=image)
shared = modal.Volume.from_name("finetune", create_if_missing=True)


@app.function(gpu=GPU, timeout=HOURS * 3600, volumes={"/shared": shared}, retries=modal.Retries(max_retries=10))
def train(flags: list[str]) -> None:
    subprocess.run(command(flags), cwd="/root/finetune", check=True)


def command(flags: list[str]) -> list[str]:
    """torchrun over the GPUs of the machine; the folder is in the volume, and every start but the first resumes."""
    ranks = GPU.partition(":")[2] or "1"
    ours = ["--save_every", "100", "--output_dir", "/shared/outputs/modal", "--resume", "auto"]
    return ["torchrun", "--standalone", f"--nproc_per_node={ranks}", "train.py", *ours, *flags]


@app.local_entrypoint()
def main(flags: str) -> None:
    train.remote(shlex.split(flags))
