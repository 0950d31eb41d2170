"""The repository rule `cuda_binutils`: cuobjdump and nvdisasm, which read the machine code of kernels.

Fetched when a target asks for them, and only then: the wheels that third_party/python/cuda-binutils.txt pins, kept in
the user's cache.
"""

_BUILD = """\
package(default_visibility = ["//visibility:public"])

exports_files(["cuobjdump"])
"""

def _cuda_binutils_impl(rctx):
    for label in rctx.attr.inputs:
        rctx.path(label)  # asking for the path makes the rule depend on the file
    env = json.decode(rctx.read(rctx.path(rctx.attr.env)))
    variables = {name: rctx.os.environ[name] for name in ["RL_ENV_CACHE"] if name in rctx.os.environ}
    result = rctx.execute(
        [env["python"], "-I", rctx.path(rctx.attr.script), "--name", "cuda-binutils", "--lock", rctx.path(rctx.attr.lock)],
        environment = variables,
        quiet = False,
        timeout = 600,
    )
    if result.return_code:
        fail("cuobjdump and nvdisasm could not be fetched.\n" + "\n".join(result.stderr.splitlines()[-25:]))
    folder = rctx.path(result.stdout.strip().splitlines()[-1] + "/nvidia/cu13/bin")

    # cuobjdump finds nvdisasm beside the file that the link leads to.
    rctx.symlink(folder.get_child("cuobjdump"), "cuobjdump")
    rctx.file("BUILD.bazel", _BUILD)

_cuda_binutils = repository_rule(
    implementation = _cuda_binutils_impl,
    attrs = {
        "env": attr.label(allow_single_file = True),
        "inputs": attr.label_list(allow_files = True),
        "lock": attr.label(allow_single_file = True),
        "script": attr.label(allow_single_file = True),
    },
    environ = ["RL_ENV_CACHE"],
)

def cuda_binutils(name):
    """Declares the repository of cuobjdump.

    Args:
      name: the name of the repository.
    """
    _cuda_binutils(
        name = name,
        env = "@python_env//:env.json",
        inputs = [
            "//third_party/python:make_env.py",
            "//third_party/python:uv.txt",
        ],
        lock = "//third_party/python:cuda-binutils.txt",
        script = "//third_party/cuda:fetch_wheels.py",
    )
