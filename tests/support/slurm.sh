#!/usr/bin/env bash
# A SLURM cluster of two nodes on this machine, in two network namespaces (tests/support/hosts.sh), for one sbatch. Needs root, slurm-wlm, munge.
#   tests/support/slurm.sh FOLDER SBATCH_OPTIONS... runs/slurm.sh MODEL DATA OUTPUT_DIR
# The daemons' configuration and logs are in FOLDER, the job's output in FOLDER/job.log. Waits; ends with the job's exit code, unless 0
# with the logs on stderr. Daemons have ports of their own in the namespaces, so that this goes beside a real cluster.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/support/hosts.sh
FOLDER=$(realpath -m "$1")
shift
DAEMONS=()
down() {
  local pid
  for pid in "${DAEMONS[@]}"; do kill "$pid" 2>/dev/null || true; done
  timeout 10 tail -f /dev/null "${DAEMONS[@]/#/--pid=}" || true # until they have ended; hosts_down ends those that have not
  hosts_down
  rm -rf "$SOCKETS"
}
SOCKETS=$(mktemp -d) # a socket's path has to be short
chmod 755 "$SOCKETS"
mkdir -p "$FOLDER"/{state,spool-h1,spool-h2}
trap down EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
hosts_up

dd if=/dev/urandom of="$SOCKETS/key" bs=128 count=1 status=none
chmod 600 "$SOCKETS/key"
munged --foreground --key-file="$SOCKETS/key" --socket="$SOCKETS/munge" --pid-file="$SOCKETS/pid" --seed-file="$SOCKETS/seed" \
  --log-file="$FOLDER/munged.log" >"$FOLDER/munged.out" 2>&1 &
DAEMONS+=($!)

export SLURM_CONF=$FOLDER/slurm.conf
cat >"$SLURM_CONF" <<END
ClusterName=tests
SlurmctldHost=h1(10.9.0.1)
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$SOCKETS/munge,cred_expire=10
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=20
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool-%n
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd-%n.pid
SlurmctldLogFile=$FOLDER/slurmctld.log
SlurmdLogFile=$FOLDER/slurmd-%n.log
NodeName=h1 NodeAddr=10.9.0.1 CPUs=4 State=UNKNOWN
NodeName=h2 NodeAddr=10.9.0.2 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=h1,h2 Default=YES MaxTime=INFINITE State=UP
END
on "$FIRST" slurmctld -D >"$FOLDER/slurmctld.out" 2>&1 &
DAEMONS+=($!)
on "$FIRST" slurmd -D >"$FOLDER/slurmd-h1.out" 2>&1 &
DAEMONS+=($!)
on "$SECOND" slurmd -D >"$FOLDER/slurmd-h2.out" 2>&1 &
DAEMONS+=($!)

logs() { tail -n 40 "$FOLDER"/*.log "$FOLDER"/*.out >&2; }
for _ in {1..60}; do
  IDLE=$(on "$FIRST" sinfo -h -t idle -o %D 2>/dev/null) || true
  [[ $IDLE == 2 ]] && break
  sleep 0.5
done
[[ ${IDLE:-} == 2 ]] || { logs && echo "slurm.sh: the nodes are not idle after 30 s" >&2 && exit 1; }

CODE=0
on "$FIRST" sbatch --wait --output="$FOLDER/job.log" "$@" &
wait $! || CODE=$?
if ((CODE)); then logs; fi
exit $CODE
