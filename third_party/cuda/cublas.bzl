"""The repository rule `cublas`: headers and libraries of cuBLAS, which toolkits often lack.

Fetched when a target asks for it, and only then. fetch_cublas.py does the work: the Python environment's own copy where
there is one (RL_FLAVOR=cuda), else the wheel that lock.cuda.txt pins, kept in the user's cache.
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = ["include"],
    includes = ["include"],
    deps = ["@cuda//:headers"],
)

cc_import(
    name = "cublaslt_library",
    shared_library = "libcublasLt.so.13",
)

cc_library(
    name = "cublaslt",
    deps = [
        ":cublaslt_library",
        ":headers",
    ],
)
"""

def _cublas_impl(rctx):
    for label in rctx.attr.inputs:
        rctx.path(label)  # asking for the path makes the rule depend on the file
    env = json.decode(rctx.read(rctx.path(rctx.attr.env)))
    variables = {name: rctx.os.environ[name] for name in ["RL_ENV_CACHE"] if name in rctx.os.environ}
    result = rctx.execute(
        [env["python"], "-I", rctx.path(rctx.attr.script), "--site-packages", env["site_packages"]],
        environment = variables,
        quiet = False,
        timeout = 3600,
    )
    if result.return_code:
        fail("cuBLAS could not be fetched.\n" + "\n".join(result.stderr.splitlines()[-25:]))
    folder = rctx.path(result.stdout.strip().splitlines()[-1])
    rctx.symlink(folder.get_child("include"), "include")
    rctx.symlink(folder.get_child("lib").get_child("libcublasLt.so.13"), "libcublasLt.so.13")
    rctx.file("BUILD.bazel", _BUILD)

_cublas = repository_rule(
    implementation = _cublas_impl,
    attrs = {
        "env": attr.label(allow_single_file = True),
        "inputs": attr.label_list(allow_files = True),
        "script": attr.label(allow_single_file = True),
    },
    environ = ["RL_ENV_CACHE"],
)

def cublas(name):
    """Declares the repository of cuBLAS.

    Args:
      name: the name of the repository.
    """
    _cublas(
        name = name,
        env = "@python_env//:env.json",
        inputs = [
            "//third_party/cuda:fetch_wheels.py",
            "//third_party/python:lock.cuda.txt",
            "//third_party/python:make_env.py",
            "//third_party/python:uv.txt",
        ],
        script = "//third_party/cuda:fetch_cublas.py",
    )
