#!/bin/sh
# Fine-tune a Llama with LoRA on two devices; then merge, export, evaluate and generate.
#
#   examples/finetune_llama.sh MODEL TOKENS.bin OUT PROMPT
#
# MODEL is a folder that `transformers` has written, with a tokenizer, and TOKENS.bin a file of its
# tokens. OUT gets the checkpoints, in `run`, and the model, in `tuned`, which `from_pretrained` loads.
# SIZES is a file of sizes, or sizes such as "model=2048 layers=16". DTYPE is the dtype of the tokens.
set -eu

model=$1 tokens=$2 out=$3 prompt=$4
models=$(dirname "$0")/models
: "${SIZES:=$models/sizes/llama3_1b.mdsl}" "${BATCH:=batch=2 seq=128}"
: "${STEPS:=20}" "${DTYPE:=uint32}" "${NEW:=16}"
devices="--mesh data:1,tp:2 --layout megatron"
mkdir -p "$out"

# The last tenth of the tokens is held out.
# shellcheck disable=SC2086
meshdsl train "$models/llama_lora.mdsl" --params "$model" --data "$tokens" --tokens "$DTYPE" \
  --steps "$STEPS" --eval-every "$STEPS" --checkpoint "$out/run" --log "$out/log.jsonl" \
  $devices --set $SIZES $BATCH

# shellcheck disable=SC2086
meshdsl export "$models/llama_lora.mdsl" --params "$out/run" --apply merged \
  --out "$out/tuned" --as hf:bf16 --set $SIZES

# shellcheck disable=SC2086
meshdsl evaluate "$models/llama.mdsl" --params "$out/tuned" --data "$tokens" --tokens "$DTYPE" \
  --batches 4 $devices --set $SIZES $BATCH

# shellcheck disable=SC2086
meshdsl generate "$models/llama.mdsl" --params "$out/tuned" --prompt "$prompt" --steps "$NEW" --json \
  $devices --set $SIZES batch=1 seq=64 > "$out/text.json"
cat "$out/text.json"
