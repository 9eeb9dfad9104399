#!/usr/bin/env bash
# A few hundred short questions (examples/questions.json) as data/example-chat-dataset, with a BPE of 768 tokens trained
# on them. The last rows, recombinations of the others, are the test rows. Offline, in about a second.
set -euo pipefail
cd "$(dirname "$0")/.."
rows=$(grep -c conversations examples/questions.json)
python="${PYTHON:-$(command -v python || command -v python3)}"
"$python" -m dataset.build_chat_dataset \
    --input-file examples/questions.json \
    --output-dir data/example-chat-dataset \
    --tokenizer bpe:768 \
    --max-length 96 \
    --train-split "$(awk -v n="$rows" 'BEGIN { print (n - 20) / n }')"
echo "Next: python pretrain.py --config-name cfg_chat_recursive data_paths=[data/example-chat-dataset]"
