#!/usr/bin/env bash
# Once on each node: the Python packages of the runs, which requirements.txt lists.
# Where they are installed already, as in the image of the Dockerfile, nothing is done; elsewhere they are installed
# into a virtual environment, which the other scripts then use.
#   PYTHON        the interpreter (default: python3)
#   ENVIRONMENT   folder of the virtual environment (default: environment, beside this file)
#   PIP_OPTIONS   options of pip, such as --index-url=... for builds of torch
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
environment=${ENVIRONMENT:-$here/environment}
differs() { ! "$1" -P "$here/fluxtrain/runtime/installed.py" "$here/requirements.txt"; }

if differs "${PYTHON:-python3}"; then
    "${PYTHON:-python3}" -m venv "$environment"
    # shellcheck disable=SC2086 # several options
    "$environment/bin/python" -m pip install ${PIP_OPTIONS:-} --no-deps --requirement "$here/requirements.txt"
    if differs "$environment/bin/python"; then exit 1; fi
fi
echo "setup: all packages of the runs are installed"
