#!/usr/bin/env bash
# train.py on two "hosts", one rank on each: network namespaces of this machine (tests/support/hosts.sh). Needs root.
#   tests/support/two_hosts.sh static|c10d|elastic|hand FOLDER FLAGS OF train.py...
# static, c10d: torchrun with that rendezvous and TORCHRUN_FLAGS; elastic: c10d with one host or both; hand: RANK and WORLD_SIZE. What each wrote is in
# FOLDER/h1.log and h2.log, their exit codes in h1.code and h2.code. Ends with the first's, or the second's where that is 0 and both are needed; unless
# 0 with both logs on stderr.
set -euo pipefail
cd "$(dirname "$0")/../.."
source tests/support/hosts.sh
HOW=$1 FOLDER=$2 PORT=29511
shift 2
PYTHON=${PYTHON:-python}
mkdir -p "$FOLDER"
trap hosts_down EXIT
trap 'exit 143' TERM
trap 'exit 130' INT
hosts_up

start() { # number of the host from 0, its namespace, its address
  local nodes=2 conf="is_host=$((1 - $1))"
  if [[ $HOW == elastic ]]; then nodes=1:2 conf+=,last_call_timeout=5,keep_alive_interval=1; fi
  local torchrun=("$PYTHON" -m torch.distributed.run --nnodes=$nodes --nproc_per_node=1 ${TORCHRUN_FLAGS:-})
  case $HOW in
    static) on "$2" "${torchrun[@]}" --node_rank="$1" --master_addr=10.9.0.1 --master_port=$PORT "${@:4}" ;;
    c10d | elastic) on "$2" "${torchrun[@]}" --rdzv_backend=c10d --rdzv_id=7 --rdzv_endpoint=10.9.0.1:$PORT \
      --rdzv_conf="$conf" --local_addr="$3" "${@:4}" ;;
    hand) RANK=$1 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=10.9.0.1 MASTER_PORT=$PORT on "$2" "$PYTHON" "${@:4}" ;;
    *) echo "two_hosts.sh $HOW: is none of static, c10d, elastic, hand." >&2 && exit 2 ;;
  esac
}

export PYTHONWARNINGS=ignore
start 0 "$FIRST" 10.9.0.1 train.py "$@" >"$FOLDER/h1.log" 2>&1 &
FIRST_PID=$!
start 1 "$SECOND" 10.9.0.2 train.py "$@" >"$FOLDER/h2.log" 2>&1 &
SECOND_PID=$!
FIRST_CODE=0 SECOND_CODE=0
wait $FIRST_PID || FIRST_CODE=$?
wait $SECOND_PID || SECOND_CODE=$?
echo $FIRST_CODE >"$FOLDER/h1.code"
echo $SECOND_CODE >"$FOLDER/h2.code"
CODE=$FIRST_CODE
if ((CODE == 0)) && [[ $HOW != elastic ]]; then CODE=$SECOND_CODE; fi
if ((CODE)); then tail -n 60 "$FOLDER/h1.log" "$FOLDER/h2.log" >&2; fi
exit $CODE
