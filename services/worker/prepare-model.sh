#!/bin/sh
# prepare-model MODEL LINK: make MODEL ready to serve below the folder of LINK, then let LINK lead there.
#
# LINK is relative, so that it holds wherever the volume is mounted, and is replaced in one step: whoever follows it finds
# a complete model, the old one or the new.
set -eu

model=$1
link=$2
volume=$(dirname "$link")

mkdir -p "$volume"
answer=$(HF_HOME="$volume/hub" python -m fastserve_worker.prepare "$model" --cache-dir "$volume/converted")
folder=$(printf '%s\n' "$answer" | tail -n 1 | python -c 'import json, sys; print(json.load(sys.stdin)["model_dir"])')
target=$(realpath --relative-to="$volume" "$folder")
case $target in
  ../*) echo "prepare-model: $folder is not in $volume, so nobody else would find it; put the model there" >&2; exit 2 ;;
esac
ln -sfn "$target" "$link.new"
mv -T "$link.new" "$link"
echo "$link -> $target"
