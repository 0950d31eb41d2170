"""`cuda_library`: .cu files compiled by nvcc for every architecture that Tandem supports, as a C++ library.

Tag its targets `manual`: without nvcc they cannot be built, and everything else can.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@cuda//:toolkit.bzl", "NVCC")

# Ampere, Hopper, Blackwell; the intermediate code of the last one serves whatever comes after.
CUDA_ARCHS = ["80", "90", "100"]

_FLAGS = [
    "-std=c++20",
    "-O3",
    "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra",
]

def _gencode_flags():
    flags = ["-gencode=arch=compute_%s,code=sm_%s" % (arch, arch) for arch in CUDA_ARCHS]
    return flags + ["-gencode=arch=compute_%s,code=compute_%s" % (CUDA_ARCHS[-1], CUDA_ARCHS[-1])]

def _include_flags(context):
    flags = ["-D" + define for define in context.defines.to_list()]
    flags += ["-I" + folder for folder in context.quote_includes.to_list() + context.includes.to_list()]
    for folder in context.system_includes.to_list():
        flags += ["-isystem", folder]
    return flags

def _compile(ctx, source, context, headers):
    output = ctx.actions.declare_file("%s.objs/%s.pic.o" % (ctx.label.name, source.basename))
    ctx.actions.run(
        executable = NVCC,
        arguments = _FLAGS + _gencode_flags() + ctx.attr.copts + _include_flags(context) +
                    ["-c", source.path, "-o", output.path],
        inputs = depset([source] + headers, transitive = [context.headers]),
        outputs = [output],
        mnemonic = "CudaCompile",
        progress_message = "Compiling %s for %s" % (source.short_path, ", ".join(["sm_" + arch for arch in CUDA_ARCHS])),
        use_default_shell_env = True,
    )
    return output

def _cuda_library_impl(ctx):
    if not NVCC:
        fail("%s needs nvcc, which is neither in CUDA_HOME, nor on PATH, nor in /usr/local/cuda; install a CUDA toolkit >= 12.8" % ctx.label)
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = [dep[CcInfo] for dep in ctx.attr.deps]
    merged = cc_common.merge_cc_infos(cc_infos = deps)
    objects = [_compile(ctx, source, merged.compilation_context, ctx.files.hdrs) for source in ctx.files.srcs]
    linking_context, _ = cc_common.create_linking_context_from_compilation_outputs(
        name = ctx.label.name,
        actions = ctx.actions,
        feature_configuration = features,
        cc_toolchain = toolchain,
        compilation_outputs = cc_common.create_compilation_outputs(
            objects = depset(objects),
            pic_objects = depset(objects),
        ),
        linking_contexts = [dep.linking_context for dep in deps],
        alwayslink = True,
        disallow_dynamic_library = True,
    )
    own = cc_common.create_compilation_context(headers = depset(ctx.files.hdrs))
    return [
        DefaultInfo(files = depset(objects), data_runfiles = ctx.runfiles(files = objects)),
        CcInfo(
            compilation_context = cc_common.merge_cc_infos(
                direct_cc_infos = [CcInfo(compilation_context = own)],
                cc_infos = deps,
            ).compilation_context,
            linking_context = linking_context,
        ),
    ]

cuda_library = rule(
    implementation = _cuda_library_impl,
    attrs = {
        "copts": attr.string_list(doc = "More options for nvcc."),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "srcs": attr.label_list(allow_files = [".cu"], mandatory = True),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)

def cuda_object_tests(libraries, budgets):
    """Tests of what nvcc makes of a package's kernels; `cuda_tests` is the suite of them.

        bazel test --config=cuda //csrc/loss:cuda_tests

    Args:
      libraries: cuda_library targets.
      budgets: the file of what each kernel may use (check_sass.py).
    """
    objects = select({
        "//third_party/cuda:enabled": libraries,
        "//conditions:default": [],
    })
    paths = select({
        "//third_party/cuda:enabled": ["$(rootpaths %s)" % library for library in libraries],
        "//conditions:default": [],
    })
    tags = ["cuda", "manual"]
    native.py_test(
        name = "cuda_archs_test",
        size = "small",
        srcs = ["//third_party/cuda:list_archs.py"],
        args = paths + ["--want"] + CUDA_ARCHS,
        data = objects,
        main = "//third_party/cuda:list_archs.py",
        python_version = "PY3",
        tags = tags,
    )
    native.py_test(
        name = "cuda_sass_test",
        size = "small",
        srcs = ["//third_party/cuda:check_sass.py"],
        args = [
            "--cuobjdump",
            "$(location @cuda_binutils//:cuobjdump)",
            "--budgets",
            "$(location %s)" % budgets,
        ] + paths,
        data = [
            budgets,
            "@cuda_binutils//:cuobjdump",
        ] + objects,
        main = "//third_party/cuda:check_sass.py",
        python_version = "PY3",
        tags = tags,
    )
    native.test_suite(
        name = "cuda_tests",
        tags = ["manual"],
        tests = [
            ":cuda_archs_test",
            ":cuda_sass_test",
        ],
    )
