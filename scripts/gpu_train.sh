#!/usr/bin/env bash
# Train every family on one GPU in one run of at most ten minutes; nothing is downloaded.
#
#   TARGET=targets/smollm2-135m PROMPTS=prompts.jsonl DEV=spec_bench.jsonl OUT=outputs/gpu \
#     bash scripts/gpu_train.sh
#
# Four steps: (1) the target answers the prompts, several times each, until there are TOKENS answer
# tokens; (2) every recipe is trained for TRAIN_SECONDS; (3) every head decodes DEV greedily and at
# temperature 1, as a chain and as a tree; (4) heads are copied to OUT/heads as safetensors shards of
# at most SHARD_MB, with a manifest of sizes and SHA-256. A step that is done is not repeated, so the
# same command goes on where it was stopped. Where there is no GPU everything runs on the CPU.
#
# Where only small files can be brought along, cut the target into pieces first and give those:
#
#   bash scripts/gpu_train.sh pack targets/smollm2-135m pieces 15     # folder, pieces, MB each
#   PIECES=pieces PROMPTS=... DEV=... OUT=... bash scripts/gpu_train.sh
#
# Set one of
#   TARGET         folder of the target
#   PIECES         folder of what `pack` made: joined, checked by SHA-256 and unpacked into OUT/target
# and
#   PROMPTS        JSONL of prompts to answer (messages, prompt or turns)
#   DEV            JSONL of prompts to measure on
#   OUT            where everything goes (default: outputs/gpu)
# Optional:
#   SCALE          factor on TOKENS, TRAIN_SECONDS and DEV_PROMPTS (default: 1; 0.01 is a dry run)
#   TOKENS         answer tokens (default: 5000000)
#   ANSWER_TOKENS  longest answer (default: 256)
#   ANSWER_BATCH   prompts answered together by each process (default: 256, on a CPU 16)
#   TRAIN_SECONDS  training time of each recipe, start-up apart (default: 80)
#   BATCH          sequences per optimizer step (default: 8, on a CPU 1)
#   LENGTH         tokens per sequence (default: 1024)
#   DEV_PROMPTS    prompts measured (default: 12)
#   DEV_TOKENS     tokens decoded per prompt (default: 64)
#   JOBS           processes at once in every step (default: 12, on a CPU 1): one alone leaves a large
#                  GPU idle, as a small target waits for Python most of the time; give as many as
#                  there are cores and memory for (80 GB and 12 cores for the default)
#   RECIPES        what to train (default: recipes/smollm2-135m/compare/*.yaml)
#   BRING          recipes whose heads are copied in step 4 (default: all)
#   SHARD_MB       largest file of a head (default: 15)
#   PYTHON         interpreter (default: python)
set -euo pipefail

die() { echo "error: $*" >&2; exit 2; }
say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
# scaled NUMBER: times SCALE, at least 1, as a whole number
scaled() { awk -v x="$1" -v f="$SCALE" 'BEGIN { y = int(x * f + 0.5); print (y < 1 ? 1 : y) }'; }

pack() {
  [[ $# -eq 3 && -d "$1" ]] || die "usage: gpu_train.sh pack TARGET_FOLDER PIECES_FOLDER MB"
  mkdir -p "$2"
  [[ -z "$(ls -A "$2")" ]] || die "$2 is not empty"
  tar -C "$1" -czf - . | tee >(sha256sum | cut -d ' ' -f 1 > "$2/target.tar.gz.sha256") \
    | split -b "${3}000000" -d -a 3 - "$2/target.tar.gz."
  echo "$(find "$2" -name 'target.tar.gz.[0-9]*' | wc -l) pieces in $2"
}

if [[ "${1:-}" == pack ]]; then
  shift
  pack "$@"
  exit
fi
[[ $# -eq 0 ]] || die "unknown argument $1; settings are environment variables, see the file's head"

PYTHON="${PYTHON:-python}"
OUT="${OUT:-outputs/gpu}"
SCALE="${SCALE:-1}"
PROMPTS="${PROMPTS:?PROMPTS: JSONL of prompts to answer}"
DEV="${DEV:?DEV: JSONL of prompts to measure on}"
[[ -n "${TARGET:-}" || -n "${PIECES:-}" ]] || die "set TARGET (a folder) or PIECES (made by pack)"
[[ -z "${TARGET:-}" || -z "${PIECES:-}" ]] || die "TARGET and PIECES exclude each other"
for file in "$PROMPTS" "$DEV"; do
  [[ -f "$file" ]] || die "$file is not a file"
done
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"

if "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  gpu=1
else
  gpu=0
fi
# by_device GPU CPU: the default for where this runs
by_device() { if [[ "$gpu" == 1 ]]; then echo "$1"; else echo "$2"; fi; }
JOBS="${JOBS:-$(by_device 12 1)}"
BATCH="${BATCH:-$(by_device 8 1)}"
ANSWER_BATCH="${ANSWER_BATCH:-$(by_device 256 16)}"
LENGTH="${LENGTH:-1024}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
TOKENS="$(scaled "${TOKENS:-5000000}")"
TRAIN_SECONDS="$(scaled "${TRAIN_SECONDS:-80}")"
DEV_PROMPTS="$(scaled "${DEV_PROMPTS:-12}")"
read -r -a recipes <<< "${RECIPES:-$(echo recipes/smollm2-135m/compare/*.yaml)}"

# in_parallel LOG_PREFIX FUNCTION ITEM...: FUNCTION ITEM for each, JOBS at once, all must succeed
in_parallel() {
  local prefix="$1" body="$2" item failed=0 name pids=() names=()
  shift 2
  for item in "$@"; do
    while (( $(jobs -rp | wc -l) >= JOBS )); do sleep 0.2; done
    name="$prefix.$(basename "$item" .yaml)"
    "$body" "$item" > "$OUT/$name.log" 2>&1 &
    pids+=("$!")
    names+=("$name")
  done
  for item in "${!pids[@]}"; do
    if ! wait "${pids[$item]}"; then
      failed=1
      echo "failed: ${names[$item]}; the end of $OUT/${names[$item]}.log:" >&2
      tail -n 5 "$OUT/${names[$item]}.log" >&2
    fi
  done
  return "$failed"
}

# --- the target
if [[ -n "${PIECES:-}" ]]; then
  TARGET="$OUT/target"
  if [[ ! -f "$TARGET/config.json" ]]; then
    [[ -f "$PIECES/target.tar.gz.sha256" ]] || die "$PIECES holds no target.tar.gz.sha256"
    cat "$PIECES"/target.tar.gz.[0-9]* > "$OUT/target.tar.gz"
    found="$(sha256sum < "$OUT/target.tar.gz" | cut -d ' ' -f 1)"
    [[ "$found" == "$(cat "$PIECES/target.tar.gz.sha256")" ]] \
      || die "the pieces in $PIECES do not join to what was packed: one is missing or damaged"
    rm -rf "$TARGET.part"
    mkdir "$TARGET.part"
    tar -C "$TARGET.part" -xzf "$OUT/target.tar.gz"
    rm "$OUT/target.tar.gz"
    mv "$TARGET.part" "$TARGET"
  fi
fi
[[ -f "$TARGET/config.json" ]] || die "$TARGET holds no config.json"
say "target $TARGET, $(by_device GPU CPU), $JOBS at once"

# --- 1: answers
answer() {
  "$PYTHON" -m scripts.generate_answers --target "$TARGET" --prompts "$PROMPTS" \
    --out "$OUT/answers.$1.jsonl" --temperature 1 --seed "$(( $1 * 1000 ))" --samples 1000 \
    --min-tokens "$(( (TOKENS + JOBS - 1) / JOBS ))" --max-new-tokens "$ANSWER_TOKENS" \
    --batch-size "$ANSWER_BATCH" --dtype bfloat16
}
ANSWER_TOKENS="${ANSWER_TOKENS:-256}"
answers="$OUT/answers.jsonl"
if [[ ! -f "$answers" ]]; then
  mapfile -t parts < <(seq 0 "$(( JOBS - 1 ))")
  in_parallel answers answer "${parts[@]}" || die "the target could not answer"
  cat "$OUT"/answers.[0-9]*.jsonl > "$answers.part"
  mv "$answers.part" "$answers"
fi
say "$(wc -l < "$answers") answers, at least $TOKENS answer tokens"

# --- 2: training, 3: measuring
compare() {
  "$PYTHON" -m scripts.equal_budget --target "$TARGET" --answers "$answers" --prompts "$DEV" \
    --limit "$DEV_PROMPTS" --max-new-tokens "${DEV_TOKENS:-64}" --seconds "$TRAIN_SECONDS" \
    --out "$OUT/runs" --threads "$OMP_NUM_THREADS" \
    --set "run.batch_size=$BATCH" "run.micro_batch_size=$BATCH" "data.max_length=$LENGTH" "$@"
}
train() { compare --part train --dtype bfloat16 --recipe "$1"; }
measure() { compare --part evaluate --recipe "$1"; }
in_parallel train train "${recipes[@]}" || die "a training failed"
say "${#recipes[@]} heads trained"
in_parallel measure measure "${recipes[@]}" || die "a head could not be measured"
compare --part evaluate --recipe "${recipes[@]}" > "$OUT/results.txt" 2> "$OUT/results.log" \
  || die "the results could not be put together: $OUT/results.log"
grep '^|' "$OUT/results.txt"
tail -n 1 "$OUT/results.txt" > "$OUT/results.json"
say "measured"

# --- 4: heads to take home
heads=()
for recipe in "${recipes[@]}"; do
  name="$(basename "$recipe" .yaml)"
  if [[ -z "${BRING:-}" || " ${BRING:-} " == *" $name "* ]]; then
    heads+=("$OUT/runs/$name/head")
  fi
done
(( ${#heads[@]} )) || die "BRING names none of the recipes"
"$PYTHON" -m scripts.shard_heads "${heads[@]}" --out "$OUT/heads" --shard-mb "${SHARD_MB:-15}" \
  > "$OUT/heads.log" 2>&1 || { tail -n 3 "$OUT/heads.log" >&2; die "the heads could not be copied"; }
say "done: $OUT/results.txt, $OUT/results.json, $OUT/heads/manifest.json"
