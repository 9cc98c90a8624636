# Sourced by the scripts: sets $python to an interpreter that has the project and one of its extras.
# An active virtual environment is used as it is when it can already import what the extra brings;
# otherwise .venv is made once, and brought up to date when pyproject.toml has changed.

fail() { echo "$*" >&2; exit 1; }

find_python() {
  local name
  for name in ${PYTHON:-} python3 python3.12 python3.11 python3.13 python; do
    if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  fail "need Python 3.11, 3.12 or 3.13 on the PATH (or its path in PYTHON)"
}

has_extra() { # python, extra
  case $2 in
    test) "$1" -c 'import importlib.util as u, sys
sys.exit(any(u.find_spec(n) is None for n in ("jax", "flax", "pytest", "pytest_timeout", "xdist", "hypothesis", "gguf", "nbclient", "sentencepiece", "aiohttp", "xjax_server")))' 2>/dev/null ;;
    dev) "$1" -c 'import importlib.util as u, sys
sys.exit(any(u.find_spec(n) is None for n in ("pyright", "ruff", "xjax_server", "pytest")))' 2>/dev/null ;;
  esac
}

use_environment() { # extra: test, or dev, which contains test
  local extra=$1 stamp sum
  if [ -n "${VIRTUAL_ENV:-}" ] && [ "$VIRTUAL_ENV" != "$PWD/.venv" ] && has_extra "$VIRTUAL_ENV/bin/python" "$extra"; then
    python=$VIRTUAL_ENV/bin/python
    return
  fi
  python=$PWD/.venv/bin/python
  [ -x "$python" ] || "$(find_python)" -m venv .venv || fail "cannot make the virtual environment .venv"
  sum=$("$python" -c 'import hashlib; print(hashlib.sha256(open("pyproject.toml", "rb").read()).hexdigest())')
  for stamp in ".venv/installed-$extra" .venv/installed-dev; do
    if [ "$(cat "$stamp" 2>/dev/null)" = "$sum" ]; then return; fi
  done
  echo "installing xjax[$extra] into .venv" >&2
  "$python" -m pip install --quiet --disable-pip-version-check --editable ".[$extra]"
  echo "$sum" > ".venv/installed-$extra"
}
