#!/usr/bin/env bash
# Run on each node by `ray up`: the package and its dependencies in ~/paceline/venv, and the models that are named.
#
#   setup.sh [HUGGING_FACE_ID ...] [--without-weights HUGGING_FACE_ID ...]
#
# --without-weights: configuration and tokenizer alone, which routers and drafts need of the target.
#
# ~/paceline/dist holds the wheel and constraints.txt. PACELINE_PYTHON: the interpreter, 3.11 to 3.13, the same version on
# every node. PACELINE_MODELS: an s3:// or gs:// address or a folder laid out as a Hugging Face cache (hub/models--*);
# unset: models come from the hub. Runs again when a node is started again, and then changes nothing.
set -euo pipefail
cd ~/paceline
. ./environment.sh

if [ ! -x venv/bin/python ]; then
  for python in ${PACELINE_PYTHON:-python3.13 python3.12 python3.11 python3}; do
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2> /dev/null && break
    python=
  done
  [ -n "$python" ] || { echo "no Python of 3.11 to 3.13 on $(hostname): install one, or set PACELINE_PYTHON" >&2; exit 1; }
  "$python" -m venv venv || { rm -rf venv; sudo apt-get install -y python3-venv; "$python" -m venv venv; }  # Ubuntu
fi

wheels=(dist/paceline-*.whl)
[ ${#wheels[@]} -eq 1 ] && [ -f "${wheels[0]}" ] || { echo "one wheel is needed, not: ${wheels[*]}" >&2; exit 1; }
if ! sha256sum --status --check venv/paceline.sha256 2> /dev/null; then
  before=$(compgen -G 'venv/lib/python*/site-packages/paceline' || true)
  venv/bin/pip install --quiet --constraint dist/constraints.txt "${wheels[0]}[serve]"
  [ -z "$before" ] || venv/bin/pip install --quiet --force-reinstall --no-deps "${wheels[0]}"  # maybe the same version
  sha256sum "${wheels[0]}" > venv/paceline.sha256
fi

# The attention kernel for GPUs is compiled where it runs, by a C compiler with Python's headers.
if command -v nvidia-smi > /dev/null && ! { command -v cc && venv/bin/python -c 'import os, sysconfig
os.stat(sysconfig.get_path("include") + "/Python.h")'; } > /dev/null 2>&1; then
  sudo apt-get install -y gcc "python$(venv/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev"
fi

left_out=()  # suffixes of files
for model in "$@"; do
  [ "$model" != --without-weights ] || { left_out=(safetensors bin pt pth gguf h5 msgpack onnx); continue; }
  folder=hub/models--${model//\//--}
  mkdir -p "$HF_HOME/$folder"
  case ${PACELINE_MODELS:-} in
    '') venv/bin/hf download --quiet "$model" "${left_out[@]/#/--exclude=*.}" ;;
    s3://*) aws s3 sync --only-show-errors --exclude='blobs/*' "${left_out[@]/#/--exclude=*.}" \
              "$PACELINE_MODELS/$folder" "$HF_HOME/$folder" ;;
    gs://*) pattern="^blobs/${left_out:+|[.]($(IFS='|' && echo "${left_out[*]}"))\$}"
            gcloud storage rsync --recursive --exclude="$pattern" "$PACELINE_MODELS/$folder" "$HF_HOME/$folder" ;;
    *) tests=()
       for suffix in "${left_out[@]}"; do tests+=(! -name "*.$suffix"); done
       cd "$PACELINE_MODELS/$folder"
       find . -name blobs -prune -o ! -type d "${tests[@]}" \
         -exec cp --parents --dereference --update --preserve=timestamps -t "$HF_HOME/$folder" {} +
       cd ~/paceline ;;
  esac
done
