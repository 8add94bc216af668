#!/usr/bin/env bash
# Repeats a result and prints how long it took: ./run_and_time.sh [N [--FIELD=VALUE ...]]
#   N                             the result, of result_N.txt (default: 0)
#   --seed=random                 with another seed; every other field of the job can be changed in the same way
#   DATAROOT, MODELROOT, LOGDIR   folders of the data sets, of weights, and for the output
#   PROCESSES                     trainers on this node (default: one for each GPU)
#   NODES, RENDEZVOUS             number of nodes, and HOST:PORT of the first one; run this on each of them.
#                                 On Kubernetes instead: kubectl apply -f job_N.yaml
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${ENVIRONMENT:-$here/environment}/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
export PYTHONPATH=$here PYTHONUNBUFFERED=1

number=${1:-0}
output=${LOGDIR:-$PWD/runs}/result_$number
options=(--output "$output")
[ -z "${PROCESSES:-}" ] || options+=(--processes "$PROCESSES")
[ -z "${NODES:-}" ] || options+=(--nodes "$NODES" --rendezvous "$RENDEZVOUS")

"$python" -m fluxtrain.cli run "$here/job_$number.yaml" "${options[@]}" "${@:2}"
if [ -f "$output/mlperf.log" ]; then # of the node with rank 0
    "$python" - "$output" <<'END'
import sys
from pathlib import Path

from fluxtrain.mlperf.evidence import read_finished_run

print(f"time from run_start to run_stop: {read_finished_run(Path(sys.argv[1])).minutes:.3f} minutes")
END
    "$python" -m fluxtrain.cli mlperf check "$output/mlperf.log"
fi
