"""CUDA kernels on the CPU: `emulated_cuda_library` compiles .cu files for the emulator, `emulated_cc_test` tests them.

    emulated_cuda_library(
        name = "row_stats_emulated",
        srcs = ["row_stats_cuda.cu"],
        deps = [":row_stats", "//csrc/common:simt_headers"],
    )
    emulated_cc_test(
        name = "row_stats_emulated_test",
        srcs = ["row_stats_test.cc"],
        deps = [":row_stats_emulated", "//csrc/testing:backend_emulated"],
    )
"""

load("//csrc:copts.bzl", "COPTS")

# Each is another order of threads and blocks, and another poison of shared memory.
SEEDS = [0, 3, 7, 11]

# Products and sums stay apart, so that results equal those of plain C++ to the bit.
_COPTS = [
    "-O2",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]

# Calls into the emulator before each access to memory; address sanitizer and this exclude each other.
_WATCH_COPTS = select({
    "//csrc/testing:sanitize_address": [],
    "//csrc/testing:sanitize_thread": [],
    "//conditions:default": ["-fsanitize=thread"],
})

# Of a target that is built with a sanitizer in every configuration (//csrc/testing/planted).
_OWN_SANITIZER_COPTS = {
    "address": [
        "-g",
        "-fsanitize=address",
    ],
    "undefined": [
        "-fsanitize=undefined",
        "-fno-sanitize-recover=undefined",
    ],
}

def emulated_cuda_library(name, srcs, deps = [], copts = [], sanitizer = None, **kwargs):
    """The kernels and host functions of .cu files for the emulator.

    Args:
      name: the target.
      srcs: .cu files; messages name their own lines.
      deps: as of cc_library: headers without CUDA.
      copts: more options of the compiler.
      sanitizer: one that this target alone is built with, "address" or "undefined".
      **kwargs: passed to cc_library.
    """
    emulator = "//csrc/testing:simt_emulator"
    more_copts = copts + _WATCH_COPTS
    if sanitizer == "address":
        emulator = "//csrc/testing:simt_emulator_address"
        more_copts = copts
    copies = []
    for src in srcs:
        copy = "%s.%s.cc" % (name, src.split("/")[-1].split(":")[-1][:-len(".cu")])
        native.genrule(
            name = copy + "_copy",
            testonly = True,
            srcs = [src],
            outs = [copy],
            cmd = "{ echo '#line 1 \"$(execpath %s)\"'; cat $<; } > $@" % src,
        )
        copies.append(copy)
    native.cc_library(
        name = name,
        testonly = True,
        srcs = copies,
        copts = _COPTS + _OWN_SANITIZER_COPTS.get(sanitizer, []) + more_copts,
        linkstatic = True,
        local_defines = ["TANDEM_SIMT_EMULATOR"],
        deps = [emulator] + deps,
        **kwargs
    )

def emulated_cc_test(name, srcs, deps = [], size = "medium", tags = [], **kwargs):
    """A googletest of emulated kernels, once per seed and in strict mode; `name` is the suite of them.

    Args:
      name: the suite; its tests are `name`_seed0 and so on.
      srcs: the test files, compiled once.
      deps: what they use; googletest is added.
      size: the time limit of one seed.
      tags: of the tests.
      **kwargs: passed to the tests.
    """
    native.cc_library(
        name = name + "_cases",
        testonly = True,
        srcs = srcs,
        copts = COPTS,
        deps = deps + ["//third_party/googletest:gtest_main"],
        alwayslink = True,
        linkstatic = True,
    )
    for seed in SEEDS:
        native.cc_test(
            name = "%s_seed%d" % (name, seed),
            size = size,
            # Sanitizers look at addresses and numbers, on which the order has no bearing: once is enough.
            tags = tags + (["no-sanitizer"] if seed != SEEDS[0] else []),
            env = {
                "SIMT_SEED": str(seed),
                "SIMT_STRICT": "1",
            },
            linkstatic = True,
            deps = [":%s_cases" % name],
            **kwargs
        )
    native.test_suite(
        name = name,
        tests = [":%s_seed%d" % (name, seed) for seed in SEEDS],
    )
