#!/bin/sh
{% if machines == 1 %}
# Starts train.py on this machine: sh run.sh
{% else %}
# Starts train.py on {{ machines }} machines. On each of them: HEAD=<name of the first one> sh run.sh
{% endif %}
cd "$(dirname "$0")" || exit
# torchrun kills ranks that have not ended so many seconds after a SIGTERM.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
{% if machines == 1 %}
exec torchrun --standalone --nproc-per-node {{ ranks }} --max-restarts 3 train.py
{% else %}
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes {{ machines }} --nproc-per-node {{ ranks }} --max-restarts 3 --rdzv-backend c10d \
  --rdzv-endpoint "${HEAD:?}:${MASTER_PORT:-29500}" --rdzv-id autotp train.py
{% endif %}
