"""`torch_op_library`: a shared library of torch operators, bound through torch's stable ABI."""

# The oldest torch whose stable ABI has what the bindings call (2.10: typed data pointers, parallel_for).
_TARGET_VERSION = "0x020a000000000000"

def torch_op_library(name, library, srcs, deps, copts = [], **kwargs):
    """Builds operators that `torch.ops.load_library` loads into any torch from 2.10 on.

    Args:
      name: the target, which has the library as its only file.
      library: the name of the file, lib*.so.
      srcs: the sources that register operators.
      deps: what they call; linked in.
      copts: compiler options.
      **kwargs: passed to both targets.
    """
    native.cc_binary(
        name = library,
        srcs = srcs,
        copts = copts,
        linkopts = [
            # The place of torch in site-packages when the library lies in rl/_native; otherwise `import torch` came first.
            "-Wl,-rpath,'$$ORIGIN/../../torch/lib'",
            "-Wl,--as-needed",
            "-Wl,--exclude-libs,ALL",
        ],
        linkshared = True,
        local_defines = ["TORCH_TARGET_VERSION=" + _TARGET_VERSION],
        deps = deps + ["//third_party/torch"],
        **kwargs
    )
    native.filegroup(
        name = name,
        srcs = [":" + library],
        **kwargs
    )
