#!/usr/bin/env bash
# Regenerates sdk/fastserve/v1 from protos/fastserve/v1 with the pinned generator, in a venv of its own.
# With an argument: generates below that folder instead of sdk.
set -euo pipefail
out=$(realpath "${1:-"$(dirname "$0")/../sdk"}")
cd "$(dirname "$0")/.."
venv=.venv-proto
if [ ! -x "$venv/bin/protoc-gen-mypy" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r requirements/proto.txt
fi
rm -f "$out"/fastserve/v1/*_pb2*
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc -I protos \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=quiet:"$out" --mypy_grpc_out=quiet:"$out" \
  protos/fastserve/v1/*.proto
