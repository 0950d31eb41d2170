"""The rules of the Python tree: `rl_pytest` runs test files, `rl_binary` is an entry point.

BUILD files under rl/ and tests/ are written by //tools:build_files; it uses these names.
"""

_RUNNER = "//tools/bazel_rules:run_pytest.py"

# A script's own folder must not be on sys.path: a module of ours there would hide one of the standard library.
_SAFE_PATH = {"PYTHONSAFEPATH": "1"}

def rl_binary(name, srcs, env = {}, **kwargs):
    """An entry point for `bazel run`.

    Args:
      name: the target; its main file is the first of `srcs`.
      srcs: Python files.
      env: environment variables for `bazel run`.
      **kwargs: passed to py_binary.
    """
    native.py_binary(
        name = name,
        srcs = srcs,
        main = srcs[0],
        python_version = "PY3",
        env = dict(_SAFE_PATH, **env),
        **kwargs
    )

def rl_pytest(name, srcs, size = "medium", deps = [], data = [], env = {}, **kwargs):
    """Pytest files as one test, in one process; the cases can be spread over shards with `shard_count`.

    Args:
      name: the target.
      srcs: the test files.
      size: sets the time limit, as for every Bazel test.
      deps: Python libraries that the files import, and the conftest files above it.
      data: files that the tests read.
      env: environment variables of the test.
      **kwargs: passed to py_test.
    """
    native.py_test(
        name = name,
        size = size,
        srcs = [_RUNNER] + srcs,
        main = _RUNNER,
        args = ["$(rootpath %s)" % src for src in srcs],
        data = data + ["//:pyproject.toml"],
        python_version = "PY3",
        env = dict(_SAFE_PATH, **env),
        deps = deps,
        **kwargs
    )
