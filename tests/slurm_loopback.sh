#!/usr/bin/env bash
# Slurm on this one machine runs training as two processes that know of each other from Slurm's variables alone.
#     sudo apt-get install slurm-wlm munge && sudo tests/slurm_loopback.sh [python]
# Starts munged, slurmctld and slurmd of its own, in a folder of its own, and ends them; a Slurm that already runs here
# is left alone.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
for program in munged slurmctld slurmd srun; do
    command -v "$program" >/dev/null || { echo "$program is not installed: apt-get install slurm-wlm munge" >&2; exit 77; }
done
[ "$(id -u)" = 0 ] || { echo "slurmd needs root: sudo $0" >&2; exit 77; }
folder=$(mktemp -d)
chmod 755 "$folder"
node=$(hostname -s)
pids=()
finish() {
    for pid in "${pids[@]}"; do kill "$pid" 2>/dev/null || true; done
    wait
    [ -n "${KEEP:-}" ] && echo "kept: $folder" || rm -rf "$folder"
}
trap finish EXIT

mkdir -p "$folder"/{state,spool}
dd if=/dev/urandom of="$folder/munge.key" bs=1024 count=1 2>/dev/null
chmod 600 "$folder/munge.key"
munged --foreground --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --num-threads=2 \
    --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" &
pids+=($!)
cat >"$folder/slurm.conf" <<CONF
ClusterName=loopback
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=all Nodes=$node Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
CONF
export SLURM_CONF="$folder/slurm.conf"
slurmctld -D -i >/dev/null 2>&1 &
pids+=($!)
slurmd -D -N "$node" >/dev/null 2>&1 &
pids+=($!)
for _ in $(seq 60); do
    sinfo -h -t idle,mix -o %n 2>/dev/null | grep -q . && break
    sleep 0.5
done
sinfo

run="$folder/run"
env JAX_PLATFORMS=cpu srun -n 2 --overcommit --kill-on-bad-exit=1 "$python" core/grpo.py --env_name poem \
    --groups_per_batch 2 --group_size 4 --ppo_minibatch 4 --num_generation_tokens 12 --max_steps 2 \
    --num_score_workers 1 --save_dir "$run" | tee "$folder/output"
grep -q "x 2 of 2 processes" "$folder/output"
[ "$(wc -l <"$run/metrics.jsonl")" = 2 ] && [ -f "$run/step2/model.safetensors" ]
echo "Slurm ran two processes as one job."
