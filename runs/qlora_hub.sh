#!/usr/bin/env bash
# QLoRA of a hub model: a 4-bit base, activations recomputed in backward. Gated models read HF_TOKEN.
#   runs/qlora_hub.sh MODEL DATA OUTPUT_DIR
set -euo pipefail
cd "$(dirname "$0")/.."
MODEL=${1:-Qwen/Qwen2.5-7B-Instruct}
DATA=${2:-alpaca_sample}
OUT=${3:-outputs/qlora}

# What would run, with the reason for each choice; nothing is loaded.
python train.py --model_name "$MODEL" --dataset "$DATA" --train_type qlora --output_dir "$OUT" --dry_run
python train.py \
  --model_name "$MODEL" --train_type qlora --double_quant \
  --dataset "$DATA" --context_length 1024 \
  --batch_size 16 --microbatch_tokens 4096 --use_gradient_checkpointing \
  --lora_rank 32 --lora_alpha 64 \
  --save_every 100 --output_dir "$OUT" --resume auto
python export.py --checkpoint "$OUT" --output_dir "$OUT-merged"
