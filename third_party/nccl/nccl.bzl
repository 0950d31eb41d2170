"""The repository rule `nccl`: NCCL's header and library, for the check of csrc/refit/nccl_api.h against them.

Fetched when a target asks for it, and only then; what is built and shipped opens the library at run time. fetch_nccl.py
does the work, as fetch_cublas.py does for cuBLAS.
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

exports_files(["libnccl.so.2"])

cc_library(
    name = "headers",
    hdrs = glob(["include/*.h"]),
    includes = ["include"],
    deps = ["@cuda//:headers"],
)

cc_import(
    name = "nccl_library",
    shared_library = "libnccl.so.2",
)

cc_library(
    name = "nccl",
    deps = [
        ":headers",
        ":nccl_library",
    ],
)
"""

def _nccl_impl(rctx):
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
        fail("NCCL could not be fetched.\n" + "\n".join(result.stderr.splitlines()[-25:]))
    folder = rctx.path(result.stdout.strip().splitlines()[-1])
    rctx.symlink(folder.get_child("include"), "include")
    rctx.symlink(folder.get_child("lib").get_child("libnccl.so.2"), "libnccl.so.2")
    rctx.file("BUILD.bazel", _BUILD)

_nccl = repository_rule(
    implementation = _nccl_impl,
    attrs = {
        "env": attr.label(allow_single_file = True),
        "inputs": attr.label_list(allow_files = True),
        "script": attr.label(allow_single_file = True),
    },
    environ = ["RL_ENV_CACHE"],
)

def nccl(name):
    """Declares the repository of NCCL.

    Args:
      name: the name of the repository.
    """
    _nccl(
        name = name,
        env = "@python_env//:env.json",
        inputs = [
            "//third_party/cuda:fetch_wheels.py",
            "//third_party/python:lock.cuda.txt",
            "//third_party/python:make_env.py",
            "//third_party/python:uv.txt",
        ],
        script = "//third_party/nccl:fetch_nccl.py",
    )
