#!/usr/bin/env bash
# CUDA MPS for the engines of one user: their kernels run side by side on the GPU instead of taking turns.
#
#   cluster/mps.sh start            before the application starts
#   eval "$(cluster/mps.sh env)"    in the shell that starts Ray or the application: engines inherit it
#   cluster/mps.sh status
#   cluster/mps.sh stop             after the application has ended
#
# No share of the GPU's threads is set: an engine that is alone uses all of them.
set -euo pipefail

# A folder per user: MPS serves one user at a time, and a foreign daemon's pipes cannot be opened.
export CUDA_MPS_PIPE_DIRECTORY="${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps-$(id -u)}"
export CUDA_MPS_LOG_DIRECTORY="${CUDA_MPS_LOG_DIRECTORY:-/tmp/nvidia-mps-log-$(id -u)}"
# The order that engines count GPUs in (app/engines/environment.py): both must mean the same one.
export CUDA_DEVICE_ORDER=PCI_BUS_ID

control() {
    echo "$1" | timeout 30 nvidia-cuda-mps-control
}

running() {
    if ! command -v nvidia-cuda-mps-control >/dev/null; then
        echo "nvidia-cuda-mps-control is not there; it comes with NVIDIA's driver" >&2
        exit 1
    fi
    control get_server_list >/dev/null 2>&1
}

case "${1:-}" in
start)
    if running; then
        echo "MPS already runs in $CUDA_MPS_PIPE_DIRECTORY"
        exit 0
    fi
    mkdir -p -m 700 "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    nvidia-cuda-mps-control -d
    echo "MPS runs in $CUDA_MPS_PIPE_DIRECTORY"
    ;;
stop)
    if ! running; then
        echo "MPS does not run"
        exit 0
    fi
    control quit
    echo "MPS has ended"
    ;;
status)
    if ! running; then
        echo "MPS does not run in $CUDA_MPS_PIPE_DIRECTORY"
        exit 1
    fi
    echo "MPS runs in $CUDA_MPS_PIPE_DIRECTORY; servers: $(control get_server_list | tr '\n' ' ')"
    ;;
env)
    printf 'export CUDA_MPS_PIPE_DIRECTORY=%q\n' "$CUDA_MPS_PIPE_DIRECTORY"
    ;;
*)
    echo "usage: $0 start|stop|status|env" >&2
    exit 2
    ;;
esac
