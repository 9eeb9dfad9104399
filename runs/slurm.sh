#!/usr/bin/env bash
# LoRA over the GPUs of several SLURM nodes, one rank each. Edit the lines below, then
#   sbatch runs/slurm.sh MODEL DATA OUTPUT_DIR
# from this folder. Folder, model and output are on a file system that all nodes share.
#SBATCH --job-name=finetune
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@180
# The last line: three minutes before the time is over every rank hears SIGTERM, the run saves and ends with code 143.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
MODEL=${1:-HuggingFaceTB/SmolLM2-135M-Instruct}
DATA=${2:-examples/chat.jsonl}
OUT=${3:-outputs/slurm}
if [[ -f .venv/bin/activate ]]; then source .venv/bin/activate; fi

# The ranks meet on the first node, at a port of this job's own. Whoever starts again goes on from the last checkpoint.
export MASTER_PORT=$((20000 + ${SLURM_JOB_ID:-0} % 10000))
CODE=0
srun python train.py \
  --model_name "$MODEL" --train_type lora \
  --dataset "$DATA" \
  --num_epochs 3 --batch_size 4 --lr 2e-4 \
  --save_every 100 \
  --output_dir "$OUT" --resume auto || CODE=$?
# Stopped before its time was over, with something saved in this attempt: the job goes back into the queue.
# SLURM writes this script anew for each attempt, and after scancel it is gone already.
if [[ $CODE == 143 && $OUT/checkpoints -nt $0 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $CODE
