#!/usr/bin/env bash
# LoRA on your own rows, resumable: the same command goes on after a crash or a signal.
#   runs/lora_jsonl.sh MODEL DATA.jsonl OUTPUT_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${1:-HuggingFaceTB/SmolLM2-135M-Instruct}
DATA=${2:-examples/chat.jsonl}
OUT=${3:-outputs/lora}

python train.py \
  --model_name "$MODEL" --train_type lora \
  --dataset "$DATA" --validation_split 0.1 \
  --num_epochs 3 --batch_size 4 --lr 2e-4 \
  --save_every 50 --eval_every 50 \
  --output_dir "$OUT" --resume auto
python score.py --checkpoint "$OUT" --dataset "$DATA" --samples 32
