#!/bin/bash
# Training on a Slurm cluster: one `accelerate launch` per node, which starts one process per GPU.
#   sbatch --nodes 2 recipes/launch/slurm.sh --config recipes/... --run.out /shared/run
# Submit it from the repository, on a file system that all nodes see. Options in front of the script
# are sbatch's and go before the lines below; options behind it are those of recipes.train. Another
# engine: LAUNCH=recipes/launch/fsdp2.yaml in front of sbatch.
#SBATCH --job-name=headway
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
# Before its time is over the job gets SIGTERM, this many seconds early (B: this script gets it).
# All processes end their step, a checkpoint is written, the job queues again and continues there.
#SBATCH --signal=B:TERM@180
#SBATCH --requeue
set -euo pipefail

launch=${LAUNCH:-recipes/launch/multi_node.yaml}
gpus=${SLURM_GPUS_ON_NODE:?no GPUs on this node: ask for them with --gpus-per-node}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# torchrun kills 30 s after SIGTERM unless told to wait; keep this below the 180 s above.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=170

stopping=
# scancel signals the processes of the steps alone, neither this script nor srun: srun would answer
# SIGTERM by killing them before they have saved.
trap 'stopping=yes; scancel --signal=TERM "$SLURM_JOB_ID"' TERM
# srun does not take --cpus-per-task from the job (since Slurm 22.05). When one node fails the others
# are ended instead of waiting for it; nodes told to stop leave only once the checkpoint is written.
# The inner shell runs on each node, where SLURM_NODEID is that node's rank.
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} \
  bash -c 'exec accelerate launch --machine_rank "$SLURM_NODEID" "$@"' launch \
  --config_file "$launch" \
  --num_machines "$SLURM_JOB_NUM_NODES" \
  --num_processes $((SLURM_JOB_NUM_NODES * gpus)) \
  --main_process_ip "$first" \
  --main_process_port $((20000 + SLURM_JOB_ID % 20000)) \
  --rdzv_backend c10d \
  -m recipes.train "$@" &
steps=$!
status=0
wait "$steps" || status=$?
while kill -0 "$steps" 2>/dev/null; do # the signal ended the wait, not the training
  wait "$steps" || status=$?
done
if [ -n "$stopping" ]; then
  echo "stopped in time; queueing again"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
