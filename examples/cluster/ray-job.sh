#!/bin/bash
# A run on a Ray cluster, as a job on its head; all nodes have `pip install 'seedbed[ray]'`:
#   examples/cluster/ray-job.sh http://head.example.org:8265 cartpole/gorila /srv/runs/cartpole
# Submitted again, it goes on with the run, whose folder is one of the head's. Where all nodes learn as one, it must be one
# that all see, and the last line needs --trusted-interface.
set -eu
address=$1 what=$2 run=$3
ray job submit --address "$address" -- seedbed train "$what" --cluster ray --run "$run"
