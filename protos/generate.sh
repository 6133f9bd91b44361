#!/usr/bin/env bash
# Regenerates sdk/fastserve/v1 from protos/fastserve/v1 with the pinned generator, in a venv of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-proto
if [ ! -x "$venv/bin/protoc-gen-mypy" ]; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r requirements/proto.txt
fi
rm -f sdk/fastserve/v1/*_pb2*
PATH="$PWD/$venv/bin:$PATH" "$venv/bin/python" -m grpc_tools.protoc -I protos \
  --python_out=sdk --grpc_python_out=sdk --mypy_out=quiet:sdk --mypy_grpc_out=quiet:sdk \
  protos/fastserve/v1/*.proto
