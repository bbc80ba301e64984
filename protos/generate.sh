#!/usr/bin/env bash
# Writes the Python code of protos/v1/*.proto into OUT/v1: messages, stubs and their types.
#
#   protos/generate.sh OUT
#
# Needs python with grpcio-tools and mypy-protobuf on PATH, as `make protos` arranges.
set -euo pipefail

out=$(cd "${1:?usage: protos/generate.sh OUT}" && pwd)
cd "$(dirname "$0")/.."
# protoc names packages after folders: a tree that is called as the code is imported.
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir "$tree/paceline"
ln -s "$out" "$tree/paceline/protos"
python -m grpc_tools.protoc -Ipaceline/protos=protos \
    --python_out="$tree" --grpc_python_out="$tree" \
    --mypy_out=quiet:"$tree" --mypy_grpc_out=quiet:"$tree" \
    protos/v1/*.proto
