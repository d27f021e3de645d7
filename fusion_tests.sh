#!/bin/sh
# Runs every combination of fused operators on small tensors, and compares each result with float64.
# It is `fuseplan driver --all`, under the name that MIOpen's documentation has for such a test; further options
# of the driver may follow: ./fusion_tests.sh --target cuda --every 10 --report told
if command -v fuseplan > /dev/null; then
    exec fuseplan driver --all "$@"
fi
installed=$(dirname "$0")/.venv/bin/fuseplan
if [ -x "$installed" ]; then
    exec "$installed" driver --all "$@"
fi
echo "the command fuseplan is not installed: run \`pip install '.[cli]'\` in this folder" >&2
exit 2
