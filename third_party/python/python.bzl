"""The repository rule `python_env`: one virtual environment for every Python target, and the headers that it carries.

make_env.py does the work. The rule runs again when the lock, the script or one of the variables below changes.

Environment variables (or --repo_env):
  RL_PYTHON        the Python 3.11 to build with; otherwise the first one found on PATH or in /usr/bin
  RL_PYTHON_VENV   use this virtual environment as it is; nothing is installed
  RL_FLAVOR        cpu (default) or cuda: which lock is installed
  RL_ENV_CACHE     where environments are kept; otherwise ~/.cache/tandem/envs
"""

_VARIABLES = ["RL_PYTHON", "RL_PYTHON_VENV", "RL_FLAVOR", "RL_ENV_CACHE"]

_CHECK = "import sys, sysconfig, os, venv, ensurepip; " + \
         "sys.exit(sys.version_info[:2] != (3, 11) or not os.path.exists(sysconfig.get_path('include') + '/Python.h'))"

_BUILD = """\
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

exports_files(["paths.bzl"])

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
    stub_shebang = "#!{python}",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)

# Headers are one directory each, not thousands of inputs: a compile starts in half the time. Bazel does not look inside,
# which is safe because the path of the environment changes with its lock.
cc_library(
    name = "python_headers",
    hdrs = ["python_include"],
    includes = ["python_include"],
)

cc_library(
    name = "pybind11_headers",
    hdrs = ["site_packages/pybind11/include"],
    includes = ["site_packages/pybind11/include"],
    deps = [":python_headers"],
)

cc_library(
    name = "torch_headers",
    hdrs = ["site_packages/torch/include"],
    defines = ["_GLIBCXX_USE_CXX11_ABI={torch_cxx11_abi}"],
    includes = [
        "site_packages/torch/include",
        "site_packages/torch/include/torch/csrc/api/include",
    ],
)

cc_library(
    name = "torch",
    linkopts = [
        "-L{site_packages}/torch/lib",
        "-ltorch",
        "-ltorch_cpu",
        "-lc10",
    ],
    deps = [":torch_headers"],
)
"""

_PATHS = """\
\"\"\"Where the Python environment of this build is.\"\"\"

PYTHON = "{python}"
SITE_PACKAGES = "{site_packages}"
PYTHON_INCLUDE = "{python_include}"
TORCH_VERSION = "{torch_version}"
TORCH_CXX11_ABI = {torch_cxx11_abi}
"""

def _find_python(rctx):
    own = rctx.os.environ.get("RL_PYTHON_VENV")
    if own:
        if not rctx.path(own + "/bin/python").exists:
            fail("RL_PYTHON_VENV=%s is no virtual environment: there is no bin/python in it" % own)
        return own + "/bin/python"
    wanted = rctx.os.environ.get("RL_PYTHON")
    if wanted:
        return wanted
    candidates = [rctx.which("python3.11"), rctx.which("python3"), "/usr/bin/python3.11", "/usr/bin/python3"]
    for candidate in candidates:
        if candidate and rctx.path(str(candidate)).exists and not rctx.execute([candidate, "-c", _CHECK]).return_code:
            return candidate
    fail("no Python 3.11 with venv and headers was found (tried %s): install python3, python3-venv and python3-dev, or set RL_PYTHON" %
         ", ".join([str(candidate) for candidate in candidates if candidate]))

def _python_env_impl(rctx):
    script = rctx.path(rctx.attr.script)
    for label in rctx.attr.inputs:
        rctx.path(label)  # asking for the path makes the rule depend on the file
    report = rctx.path("env.json")
    python = _find_python(rctx)
    variables = {name: rctx.os.environ[name] for name in _VARIABLES if name in rctx.os.environ}
    command = [python, "-I", script, "--report", report]
    result = rctx.execute(command, environment = variables, quiet = False, timeout = 3600)
    if result.return_code:
        fail("The Python environment could not be made.\n" + "\n".join(result.stderr.splitlines()[-25:]))
    env = json.decode(rctx.read(report))
    rctx.symlink(env["home"], "venv")  # for tools/python
    rctx.symlink(env["site_packages"], "site_packages")
    rctx.symlink(env["python_include"], "python_include")
    rctx.file("BUILD.bazel", _BUILD.format(**env))
    rctx.file("paths.bzl", _PATHS.format(**env))

_python_env = repository_rule(
    implementation = _python_env_impl,
    attrs = {
        "inputs": attr.label_list(allow_files = True),
        "script": attr.label(allow_single_file = True),
    },
    environ = _VARIABLES,
)

def python_env(name):
    """Declares the repository of the Python environment and registers its toolchain.

    Args:
      name: the name of the repository.
    """
    _python_env(
        name = name,
        inputs = [
            "//third_party/python:flavors.toml",
            "//third_party/python:lock.cpu.txt",
            "//third_party/python:lock.cuda.txt",
            "//third_party/python:uv.txt",
        ],
        script = "//third_party/python:make_env.py",
    )
    native.register_toolchains("@%s//:toolchain" % name)
