#!/bin/bash
# A run on this machine and others that see its folder and can be reached with ssh:
#   examples/cluster/ssh.sh /srv/runs/cartpole one two
# Ctrl-C stops and saves the run; the hosts end with it.
set -u
run=$1
shift
for machine in "$@"; do
    ssh "$machine" seedbed host "$run" &
done
if [ -e "$run/config.json" ]; then
    seedbed train --resume --run "$run"
else
    seedbed train cartpole/gorila --hosts $# --listen 0.0.0.0 --run "$run"
fi
status=$?
wait
exit $status
